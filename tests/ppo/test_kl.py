"""Estimators against the KL that they estimate, and the controllers against the paper's numbers."""

import math

import pytest
import torch

from integrations.ppo.kl import AdaptiveKLController, FixedKLController, estimate_kl, kl_controller


def test_estimators_by_hand() -> None:
    log_probs, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert estimate_kl(log_probs, reference, "k1").tolist() == [0.5, -1.0]
    assert estimate_kl(log_probs, reference, "k2").tolist() == [0.125, 0.5]
    wanted = [math.exp(-0.5) - 1 + 0.5, math.exp(1) - 1 - 1]
    assert estimate_kl(log_probs, reference, "k3").tolist() == pytest.approx(wanted)


def test_k1_and_k3_have_the_mean_that_the_kl_is() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = (p.exp() * (p - q)).sum()
    for estimator in ("k1", "k3"):
        assert (p.exp() * estimate_kl(p, q, estimator)).sum() == pytest.approx(float(exact))
    assert (estimate_kl(p, q, "k3") >= 0).all()


def test_adaptive_controller() -> None:
    controller = AdaptiveKLController(0.1, target=6.0, horizon=100)
    controller.update(6.0, 50)
    assert controller.value == pytest.approx(0.1)
    controller.update(60.0, 50)  # far above: the error is cut to 0.2
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    controller.update(5.4, 100)
    assert controller.value == pytest.approx(0.11 * 0.9)


def test_fixed_without_a_target() -> None:
    controller = kl_controller(0.1, target=0.0, horizon=100)
    controller.update(60.0, 50)
    assert isinstance(controller, FixedKLController)
    assert controller.value == 0.1
    assert isinstance(kl_controller(0.1, target=6.0, horizon=100), AdaptiveKLController)
