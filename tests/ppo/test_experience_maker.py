"""From answers to experience: who is asked in which order, and that micro-batches do not matter."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from integrations.ppo import models
from integrations.ppo.arguments import Arguments
from integrations.ppo.experience import Experience, Rollout
from integrations.ppo.experience_maker import ExperienceMaker
from integrations.ppo.kl import kl_controller
from integrations.ppo.log_probs import Scoring
from integrations.ppo.rewards import RewardComputationEngine
from integrations.ppo.rewards.rules import RuleReward
from integrations.ppo.strategy.roles import Role
from integrations.ppo.texts import tokenizer
from tests.ppo.samples import rollout

FIXED = kl_controller(0.0, 0.0, 1)
ROLLOUTS = [rollout([7, 8, 9]), rollout([10]), rollout([11, 12, 13, 14]), rollout([15, 16])]


class OneRank:
    """A strategy of one rank that shards nothing, and writes down what is asked of it."""

    device = torch.device("cpu")
    scoring = Scoring(temperature=1.0)

    def __init__(self) -> None:
        self.seen: list[str] = []
        made = {
            "critic": models.critic(Arguments()),
            "reference": models.policy(Arguments(seed=1)),
            "actor": models.policy(Arguments()),
        }
        self.roles = {name: Role(name=name, model=model) for name, model in made.items()}
        for name, model in made.items():
            model.register_forward_pre_hook(lambda *_, name=name: self.seen.append(name))

    def enter(self, phase: str) -> None:
        self.seen.append(f"phase {phase}")

    @contextmanager
    def loaded(self, role: Role) -> Iterator[None]:
        self.seen.append(f"{role.name} comes")
        yield
        self.seen.append(f"{role.name} goes")

    def evened(self, batches: Sequence[Any], filler: Any) -> Sequence[Any]:
        return batches

    def all_reduce(self, numbers: Mapping[str, float] | torch.Tensor, op: str) -> Any:
        return numbers


def made(args: Arguments, strategy: OneRank, kl_coef: float = 1.0) -> list[Experience]:
    def judge(one: Rollout) -> float:
        strategy.seen.append("reward")
        return float(len(one.response_ids))

    stand_in: Any = strategy
    judges = RewardComputationEngine([RuleReward(judge)])
    maker = ExperienceMaker(args, stand_in, tokenizer(args), judges, kl_controller(kl_coef, 0.0, 1))
    experience, _ = maker.make(ROLLOUTS)
    return [row for one in experience for row in one.rows()]


def advantages(args: Arguments, kl_coef: float = 1.0) -> torch.Tensor:
    """Of all tokens of all answers."""
    return torch.cat([row.advantages[row.action_mask] for row in made(args, OneRank(), kl_coef)])


def test_roles_take_turns() -> None:
    """R16."""
    strategy = OneRank()
    rows = made(Arguments(micro_rollout_batch_size=2), strategy)
    assert strategy.seen == [
        "phase score",
        *["actor"] * 2,
        "reference comes",
        *["reference"] * 2,
        "reference goes",
        *["critic"] * 2,
        *["reward"] * 4,
    ]
    assert [row.sequences[0].tolist() for row in rows] == [[*one.prompt_ids, *one.response_ids] for one in ROLLOUTS]
    said = [row.engine_log_probs[row.action_mask].tolist() for row in rows]
    assert said == [one.engine_log_probs for one in ROLLOUTS]


def test_the_gap_is_that_of_the_worst_token_of_all() -> None:
    strategy: Any = OneRank()
    maker = ExperienceMaker(
        Arguments(), strategy, tokenizer(Arguments()), RewardComputationEngine([RuleReward(lambda _: 0.0)]), FIXED
    )
    said = [row.log_probs[row.action_mask].tolist() for row in made(Arguments(), OneRank())]
    agreeing = [replace(one, engine_log_probs=numbers) for one, numbers in zip(ROLLOUTS, said, strict=True)]
    assert maker.make(agreeing)[1]["engine_gap"] == pytest.approx(0, abs=1e-5)
    agreeing[2].engine_log_probs[1] += 0.5
    agreeing[3].engine_log_probs[0] -= 0.25
    assert maker.make(agreeing)[1]["engine_gap"] == pytest.approx(0.5, abs=1e-5)
    agreeing[0].engine_log_probs[2] = math.nan
    assert maker.make(agreeing)[1]["engine_gap"] == math.inf, "what is no number agrees with nothing"


@pytest.mark.parametrize("more", [{"gamma": 0.5}, {"lambd": 0.5}, {"whiten_advantages": True}])
def test_micro_batches_do_not_matter(more: dict[str, Any]) -> None:
    """R68: a trainer was seen to use gamma for the first one only."""
    found = [advantages(Arguments(micro_rollout_batch_size=size, **more)) for size in (4, 2, 1)]
    for one in found[1:]:
        assert torch.allclose(one, found[0], atol=1e-5)
    assert not torch.allclose(found[0], advantages(Arguments()), atol=1e-2)


def test_kl_is_in_the_reward_or_in_the_loss() -> None:
    in_loss = advantages(Arguments(use_kl_loss=True))
    assert torch.equal(in_loss, advantages(Arguments(), kl_coef=0.0))
    assert not torch.allclose(in_loss, advantages(Arguments()), atol=1e-3)


GROUPS: dict[str, Any] = {"advantage_estimator": "group_norm", "n_samples_per_prompt": 2}


def test_answers_to_one_prompt_are_compared_with_each_other() -> None:
    """Rewards are lengths, 3 and 1, 4 and 2: half of two is the deviation."""
    rows = made(Arguments(**GROUPS), OneRank(), kl_coef=0.0)
    said = [row.advantages[row.action_mask].tolist() for row in rows]
    each = [0.5**0.5, -(0.5**0.5)] * 2
    for found, one, wanted in zip(said, ROLLOUTS, each, strict=True):
        assert found == pytest.approx([wanted] * len(one.response_ids), abs=1e-5)
    assert not any(row.returns.any() for row in rows)


def test_the_kl_of_an_answer_is_compared_as_its_reward_is() -> None:
    rows = made(Arguments(**GROUPS), OneRank(), kl_coef=5.0)
    kl = [float((row.log_probs - row.reference_log_probs)[row.action_mask].sum()) for row in rows]
    totals = [len(one.response_ids) - 5 * some for one, some in zip(ROLLOUTS, kl, strict=True)]
    signs = [1.0 if totals[0] > totals[1] else -1.0, 1.0 if totals[2] > totals[3] else -1.0]
    assert signs != [1.0, 1.0], "KL changed no order, and this shows nothing"
    wanted = [signs[0] * 0.5**0.5, -signs[0] * 0.5**0.5, signs[1] * 0.5**0.5, -signs[1] * 0.5**0.5]
    assert [float(row.advantages[row.action_mask][0]) for row in rows] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("options", [{}, GROUPS, {"whiten_advantages": True}])
def test_answers_that_are_not_grouped_and_a_rank_without_any(options: dict[str, Any]) -> None:
    """As in an evaluation."""
    strategy: Any = OneRank()
    judges = RewardComputationEngine([RuleReward(lambda _: 1.0)])
    maker = ExperienceMaker(Arguments(**options), strategy, tokenizer(Arguments()), judges, FIXED)
    experience, numbers = maker.make(ROLLOUTS[:3], grouped=False)
    assert sum(len(one.sequences) for one in experience) == 3
    assert numbers["reward"] == 1
    if options is GROUPS:
        assert not any(one.advantages.any() for one in experience)
    strategy.all_reduce = lambda numbers, op: {**numbers, "count": 7.0} if isinstance(numbers, dict) else numbers
    assert maker.make([], grouped=False)[0] == []
