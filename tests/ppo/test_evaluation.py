"""Evaluation changes nothing, and its numbers are those of all ranks together."""

from statistics import mean

import pytest

from tests.ppo.rank_steps import evaluated, numbers
from wsync.testing.ranks import run_ranks


@pytest.mark.slow
def test_evaluation() -> None:
    """R83. R67: it was seen to be of one rank, to sample as training does, and to move a normaliser.

    Random states are given back, whoever draws.
    """
    judges = "tests.ppo.rules:prompt_length tests.ppo.rules:drawing"
    options = f"--fsdp --engine_type hf --steps 1 --temperature 0.7 --reward {judges}"
    facts = run_ranks(evaluated, 2, options, timeout_s=200)
    for one in facts:
        assert one["temperatures"] == [0.0, 0.0], "of both evaluations"
        assert one["after"] == one["before"]
        assert one["numbers"] == facts[0]["numbers"]
        assert one["again"] == one["numbers"], "it is greedy, and no weight moved"
        assert len(one["prompts"]) % 2 == 1
        assert one["numbers"]["eval_reward"] == pytest.approx(mean(map(len, one["prompts"])))


@pytest.mark.slow
def test_nothing_but_an_evaluation() -> None:
    options = "--fsdp --engine_type hf --steps 0 --eval_before_train --reward tests.ppo.rules:prompt_length"
    (lines,) = run_ranks(numbers, 2, [options], timeout_s=120)[0]
    assert [sorted(line) for line in lines] == [["eval_kl", "eval_response_length", "eval_reward"]]
