"""Rules, the toy's reward, and how several become one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.ppo.arguments import parse
from integrations.ppo.errors import ConflictError
from integrations.ppo.rewards import RewardComputationEngine, rewards, total
from integrations.ppo.rewards.rules import RuleReward, imported
from integrations.ppo.toy import FIRST_BYTE, lowercase_fraction
from tests.ppo.samples import rollout


def ids(text: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in text]


def test_lowercase_fraction() -> None:
    assert lowercase_fraction(rollout(ids(b"abc"))) == 1
    assert lowercase_fraction(rollout(ids(b"aB\xff "))) == 0.25
    assert lowercase_fraction(rollout([*ids(b"a"), 1])) == 0.5, "the end of the sequence counts"


def test_the_ids_are_those_of_the_tokenizer() -> None:
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer(extra_ids=0)
    assert tokenizer("az", add_special_tokens=False).input_ids == ids(b"az")
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (259, 1, 0)


def test_aggregation() -> None:
    rollouts = [rollout([7]), rollout([7, 8])]
    rules = [RuleReward(lambda one: float(len(one.response_ids))), RuleReward(lambda one: 10.0)]
    assert RewardComputationEngine(rules)(rollouts).tolist() == [11, 12]

    def smallest(rewards: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(rewards)).amin(0)

    assert RewardComputationEngine(rules, smallest)(rollouts).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"\[\] for 2 answers"):
        RewardComputationEngine(rules, lambda rewards: rewards[0].sum())(rollouts)


def test_imported() -> None:
    assert imported("integrations.ppo.rewards:total") is total
    for path in ("integrations.ppo.rewards", "integrations.ppo.rewards:no", "no.such:thing", ""):
        with pytest.raises(ConflictError, match="can be imported"):
            imported(path)


def test_rewards_by_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """R15: a rule, a server and a model, asked in this order, and a function of one's own that makes them one."""
    seen: list[Any] = []

    def source(*given: Any, **options: Any) -> RuleReward:
        seen.append((given[1:] if len(given) > 1 else given, options))
        return RuleReward(lambda one: 10.0)

    monkeypatch.setattr("integrations.ppo.rewards.RemoteReward", source)
    monkeypatch.setattr("integrations.ppo.rewards.ModelReward", source)
    url, rule, folder = "http://127.0.0.1:1/", "tests.ppo.rules:prompt_length", str(tmp_path)
    options = "--remote_reward_timeout_s 5 --remote_reward_retries 7 --micro_rollout_batch_size 3"
    reward_fn = ["--reward_fn", "tests.ppo.rules:last"]
    strategy: Any = None
    argv = [*options.split(), "--reward", rule, url, folder]
    summed, chosen = rewards(parse(argv), strategy), rewards(parse([*argv, *reward_fn]), strategy)
    assert seen[:2] == [((url,), {"timeout_s": 5.0, "retries": 7}), ((folder, "reward 2", 3), {})]
    assert summed([rollout([7])]).tolist() == [21]
    assert chosen([rollout([7])]).tolist() == [10]
    with pytest.raises(ConflictError, match="can be imported"):
        rewards(parse(["--reward", "no/such/folder"]), strategy)
