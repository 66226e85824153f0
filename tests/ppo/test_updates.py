"""One optimizer step on a stand-in for a strategy: which tensors it reads, and when they come."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from integrations.ppo import models
from integrations.ppo.arguments import Arguments
from integrations.ppo.experience import Experience
from integrations.ppo.kl import Estimator, estimate_kl
from integrations.ppo.log_probs import Scoring, token_log_probs
from integrations.ppo.losses import policy_loss
from integrations.ppo.replay_buffer import ReplayBuffer
from integrations.ppo.strategy.roles import Role
from integrations.ppo.trainer.updates import update
from tests.ppo.samples import experience

LENGTHS = [(3, 5), (1, 1), (8, 2), (2, 7)]
CPU = torch.device("cpu")


class OneRank:
    """A strategy of one rank that shards nothing, and writes down what it is asked and who computes."""

    world_size, device, scoring = 1, CPU, Scoring(temperature=1.0)

    def __init__(self, micro_batches: int = 1) -> None:
        self.seen: list[str] = []
        self.roles, self._micro_batches = {}, micro_batches
        made = {"actor": models.policy(Arguments()), "critic": models.critic(Arguments())}
        for name, model in made.items():
            model.register_forward_pre_hook(lambda *_, name=name: self.seen.append(name))
            self.roles[name] = Role(name=name, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))

    def all_reduce(self, numbers: Mapping[str, float] | torch.Tensor, op: str) -> Any:
        return numbers

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str) -> float | None:
        self.seen.append(f"step {name}")
        if self.seen.count(f"step {name}") % self._micro_batches:
            return None
        optimizer.step()
        optimizer.zero_grad()
        return 0.5


def sampled(strategy: OneRank) -> Experience:
    """Of which the actor's log-probabilities are recorded, as by a maker."""
    batch = experience(LENGTHS)
    with torch.no_grad():
        said, _ = token_log_probs(
            strategy.roles["actor"].model, batch.sequences, batch.attention_mask, strategy.scoring
        )
    return replace(batch, log_probs=torch.where(batch.action_mask, said, 0))


def updated(strategy: OneRank, *batches: Experience, kl_coef: float = 0.0, **options: Any) -> dict[str, float]:
    stand_in: Any = strategy
    return update(Arguments(**options), stand_in, batches, kl_coef)


def test_the_old_policy_is_what_was_recorded() -> None:
    """R13: no third model, and ratios to the policy that sampled, however often it was stepped since."""
    strategy = OneRank()
    batch = sampled(strategy)
    before = replace(batch, **{one.name: getattr(batch, one.name).clone() for one in fields(Experience)})
    first = updated(strategy, batch)
    chosen = batch.action_mask
    assert first["policy_loss"] == pytest.approx(float(-batch.advantages[chosen].mean()), abs=1e-5)
    assert first["clip_fraction"] == 0
    with torch.no_grad():
        now, _ = token_log_probs(strategy.roles["actor"].model, batch.sequences, batch.attention_mask, strategy.scoring)
    loss, clipped = policy_loss(now, before.log_probs, batch.advantages, 0.2)
    second = updated(strategy, batch)
    assert second["policy_loss"] == pytest.approx(float(loss[chosen].mean()), abs=1e-5)
    assert second["clip_fraction"] == pytest.approx(float(clipped[chosen].float().mean()), abs=1e-5)
    assert second["clip_fraction"] > 0, "one step changed too little to show anything"
    assert all(torch.equal(getattr(batch, one.name), getattr(before, one.name)) for one in fields(Experience))


def test_micro_batches_come_to_the_device_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """R20: from host memory, each for its forward. A norm is told once a step."""
    strategy = OneRank(micro_batches=2)
    buffer, plain = ReplayBuffer(), Experience.to

    def moved(self: Experience, device: torch.device) -> Experience:
        strategy.seen.append(f"{len(self.sequences)} to {device}")
        return plain(self, device)

    monkeypatch.setattr(Experience, "to", moved)
    buffer.append(experience(LENGTHS))
    (micro_batches,) = buffer.steps(seed=0, rows=4, micro_rows=2)
    assert strategy.seen == ["4 to cpu"], "a buffer is in host memory"
    strategy.device = torch.device("cpu", 0)
    numbers = updated(strategy, *micro_batches)
    each = [[f"2 to {strategy.device}", name, f"step {name}"] for name in ("actor", "actor", "critic", "critic")]
    assert strategy.seen[1:] == [event for some in each for event in some]
    assert (numbers["actor_grad_norm"], numbers["critic_grad_norm"]) == (0.5, 0.5)


def test_what_a_stale_engine_sampled_weighs_as_much_as_the_actor_would_sample_it() -> None:
    """R63."""
    strategy = OneRank()
    batch = sampled(strategy)
    ratio = torch.where(torch.arange(batch.action_mask.shape[1]) % 2 == 0, 0.5, 4.0)
    stale = replace(batch, engine_log_probs=batch.log_probs - ratio.log())
    chosen, wanted = batch.action_mask, -(batch.advantages * ratio.clamp(max=2.0))
    assert updated(OneRank(), stale)["policy_loss"] == pytest.approx(float(-batch.advantages[chosen].mean()), abs=1e-5)
    found = updated(strategy, stale, importance_cap=2.0)
    assert found["policy_loss"] == pytest.approx(float(wanted[chosen].mean()), abs=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_by_hand(estimator: Estimator) -> None:
    """R14: with advantages of 0 nothing else is in it, and a step of SGD shows its gradient."""
    strategy, other = OneRank(), OneRank()
    batch = replace(sampled(strategy), advantages=torch.zeros_like(experience(LENGTHS).advantages))
    said = said_by(other, batch)
    chosen = batch.action_mask
    kl = estimate_kl(said, batch.reference_log_probs, estimator)[chosen].mean()
    step(other, 0.5 * kl)
    updated(strategy, batch, kl_coef=0.5, use_kl_loss=True, kl_estimator=estimator)
    assert_same_actor(strategy, other)


def test_entropy_in_the_loss_by_hand() -> None:
    """It is a reward: the step is towards more of it."""
    strategy, other = OneRank(), OneRank()
    batch = replace(sampled(strategy), advantages=torch.zeros_like(experience(LENGTHS).advantages))
    logits = other.roles["actor"].model(input_ids=batch.sequences, attention_mask=batch.attention_mask).logits[:, :-1]
    step(other, -0.5 * torch.special.entr(logits.softmax(-1)).sum(-1)[batch.action_mask].mean())
    updated(strategy, batch, entropy_coef=0.5)
    assert_same_actor(strategy, other)


def said_by(strategy: OneRank, batch: Experience) -> torch.Tensor:
    model = strategy.roles["actor"].model
    said, _ = token_log_probs(model, batch.sequences, batch.attention_mask, strategy.scoring)
    return said


def step(strategy: OneRank, loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    strategy.roles["actor"].optimizer.step()


def assert_same_actor(one: OneRank, other: OneRank) -> None:
    """And that it has moved."""
    first = dict(models.policy(Arguments()).named_parameters())
    found, wanted = (dict(some.roles["actor"].model.named_parameters()) for some in (one, other))
    assert any(not torch.allclose(wanted[name], first[name], atol=1e-4) for name in wanted)
    for name in wanted:
        assert torch.allclose(found[name], wanted[name], atol=1e-6), name
