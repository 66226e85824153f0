"""KL between actor and reference: estimators of one token, and the coefficient that it is weighed with."""

from typing import Literal, Protocol

import torch

Estimator = Literal["k1", "k2", "k3"]


def estimate_kl(log_probs: torch.Tensor, reference: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Of each token, from one sample: http://joschu.net/blog/kl-approx.html. Same shape as both arguments.

    k1 is unbiased and may be negative; k2 is biased and k3 is not, and neither is negative.
    """
    delta = log_probs - reference
    if estimator == "k1":
        return delta
    if estimator == "k2":
        return delta.square() / 2
    return torch.exp(-delta) - 1 + delta


class KLController(Protocol):
    """Holds the coefficient."""

    value: float

    def update(self, kl: float, sequences: int) -> None:
        """Take notice of the mean KL a sequence of so many."""
        ...


class FixedKLController:
    """The coefficient stays as it is."""

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, kl: float, sequences: int) -> None:
        """See `KLController`."""


class AdaptiveKLController:
    """Proportional controller of https://arxiv.org/abs/1909.08593, section 2.2."""

    def __init__(self, value: float, target: float, horizon: int) -> None:
        """`target` in nats a sequence, `horizon` in sequences."""
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, kl: float, sequences: int) -> None:
        """See `KLController`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * sequences / self.horizon


def kl_controller(value: float, target: float, horizon: int) -> KLController:
    """Fixed where `target` is 0."""
    return AdaptiveKLController(value, target, horizon) if target else FixedKLController(value)
