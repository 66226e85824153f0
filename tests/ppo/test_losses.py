"""Losses against values by hand, and aggregation that does not depend on how a step is cut."""

import math
from typing import Literal

import pytest
import torch

from integrations.ppo.losses import aggregate, importance, policy_loss, value_loss, weights

MASK = torch.tensor([[True, True, True, True], [True, False, False, False]])
VALUES = torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 99.0, 99.0, 99.0]])
MODES: tuple[Literal["token-mean", "seq-mean-token-mean"], ...] = ("token-mean", "seq-mean-token-mean")


@pytest.mark.parametrize(("mode", "wanted"), [(MODES[0], 4.0), (MODES[1], 6.25)])
def test_modes_differ(mode: Literal["token-mean", "seq-mean-token-mean"], wanted: float) -> None:
    denominator = weights(MASK, mode).sum()
    assert float(aggregate(VALUES, MASK, mode, denominator)) == pytest.approx(wanted)


@pytest.mark.parametrize("mode", MODES)
def test_parts_add_up(mode: Literal["token-mean", "seq-mean-token-mean"]) -> None:
    denominator = weights(MASK, mode).sum()
    whole = aggregate(VALUES, MASK, mode, denominator)
    parts = [aggregate(VALUES[row : row + 1], MASK[row : row + 1], mode, denominator) for row in range(2)]
    assert float(sum(parts)) == pytest.approx(float(whole))


def test_what_is_masked_cannot_spoil_a_loss() -> None:
    values = torch.tensor([[1.0, math.nan]])
    mask = torch.tensor([[True, False]])
    assert float(aggregate(values, mask, "token-mean", torch.tensor(1.0))) == 1.0


def test_policy_loss_by_hand() -> None:
    """Ratios 1.5 and 0.5 with advantages of both signs; clip 0.2."""
    log_probs = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, clipped = policy_loss(log_probs, torch.zeros(4), advantages, 0.2)
    assert loss.tolist() == pytest.approx([-1.2, -0.5, 1.5, 0.8])
    assert clipped.tolist() == [True, False, False, True]


def test_policy_gradient_at_the_old_policy_is_that_of_reinforce() -> None:
    log_probs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([3.0, -4.0])
    loss, _ = policy_loss(log_probs, log_probs.detach(), advantages, 0.2)
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-3.0, 4.0]


def test_importance_makes_up_for_an_engine_with_older_weights() -> None:
    """R63: the gradient expected over what the engine samples is then that over what the actor samples."""
    generator = torch.Generator().manual_seed(0)
    logits, of_engine, advantages = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    old, engine = logits.detach().log_softmax(0), of_engine.log_softmax(0)

    def gradient(sampled_by: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
        loss, _ = policy_loss(logits.log_softmax(0), old, advantages, 0.2)
        (found,) = torch.autograd.grad((sampled_by.exp() * weight * loss).sum(), logits)
        return found

    wanted = gradient(old, 1.0)
    assert torch.allclose(gradient(engine, importance(old, engine, math.inf)), wanted)
    assert not torch.allclose(gradient(engine, 1.0), wanted, atol=0.1), "there was nothing to make up for"
    ratios = importance(old, engine, 1.5)
    assert torch.equal(ratios, (old - engine).exp().clamp(max=1.5))
    assert 0 < int((ratios == 1.5).sum()) < 7
    assert importance(old, old, 1.5).tolist() == [1] * 7


def test_value_loss_by_hand() -> None:
    values, old, returns = torch.tensor([2.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([2.0, 1.0])
    assert value_loss(values, old, returns, 0.5).tolist() == pytest.approx([1.5**2 / 2, 0.9**2 / 2])
    assert value_loss(values, old, returns, 0.0).tolist() == pytest.approx([0, 0.9**2 / 2])
