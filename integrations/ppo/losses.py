"""Losses of actor and critic. Every tensor is `[batch, time]`; `mask` is true for tokens that were generated."""

from typing import Literal

import torch

AggMode = Literal["token-mean", "seq-mean-token-mean"]


def weights(mask: torch.Tensor, mode: AggMode) -> torch.Tensor:
    """How much each token counts, float32: 1, or 1 / the tokens of its sequence. 0 outside of the mask."""
    counts = mask.float()
    if mode == "token-mean":
        return counts
    return counts / counts.sum(1, keepdim=True).clamp(min=1)


def aggregate(values: torch.Tensor, mask: torch.Tensor, mode: AggMode, denominator: torch.Tensor) -> torch.Tensor:
    """Weighted sum over `denominator`: the sum of the weights in all that makes up one optimizer step, on all ranks.

    So the gradient of a step does not depend on how its sequences are cut into micro-batches, or spread over ranks.
    """
    return (torch.where(mask, values, 0) * weights(mask, mode)).sum() / denominator


def policy_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, eps_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped objective (https://arxiv.org/abs/1707.06347), and where it clipped (bool). Of each token."""
    ratio = torch.exp(log_probs - old_log_probs)
    free = ratio * advantages
    clipped = ratio.clamp(1 - eps_clip, 1 + eps_clip) * advantages
    return -torch.minimum(free, clipped), clipped < free


def importance(log_probs: torch.Tensor, engine_log_probs: torch.Tensor, cap: float) -> torch.Tensor:
    """How much likelier the actor makes each token than the engine that sampled it, at most `cap`.

    What is weighed so counts as if the actor had sampled it (https://arxiv.org/abs/1802.01561, section 4.1). The cap
    bounds variance, for some bias.
    """
    return torch.exp(log_probs - engine_log_probs).clamp(max=cap)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> torch.Tensor:
    """Half the squared error of each token; the larger one of it and that of the clipped value. 0 does not clip."""
    error = (values - returns).square()
    if value_clip:
        clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
        error = torch.maximum(error, (clipped - returns).square())
    return error / 2
