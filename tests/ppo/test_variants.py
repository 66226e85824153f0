"""Options that leave a part out, or put it elsewhere; prompts of one's own."""

import json
import re
from pathlib import Path

import pytest

from tests.ppo.rank_steps import numbers, roles
from wsync.testing.ranks import run_ranks

RUN = "--fsdp --engine_type hf --steps 2"
TIMES = re.compile("seconds|sync_share")


@pytest.mark.slow
def test_without_critic_or_reference() -> None:
    """group_norm has no critic, a KL of zero no reference."""
    group = f"{RUN} --advantage_estimator group_norm --n_samples_per_prompt 2 --rollout_batch_size 32"
    runs = [RUN, group, f"{group} --init_kl_coef 0"]
    wanted = [["actor", "critic", "reference"], ["actor", "reference"], ["actor"]]
    assert run_ranks(roles, 2, runs, timeout_s=200) == [wanted, wanted]
    found = run_ranks(numbers, 2, runs, timeout_s=200)[0]
    assert ["value_loss" in lines[0] for lines in found] == [True, False, False]
    assert [lines[1]["kl"] > 0 for lines in found] == [True, True, False]
    assert all(line["actor_grad_norm"] > 0 for lines in found for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--lora_rank 4", "--bf16 --offload_models --adam_offload"])
def test_levels_of_sleep_give_the_same_numbers(more: str) -> None:
    """Evaluations, before which the engine is awake and after which it has no weights, and iterations."""
    options = f"{RUN} --eval_before_train --eval_every 1 {more}"
    kept, dropped = run_ranks(
        numbers, 2, [f"{options} --engine_sleep_level {level}" for level in (1, 2)], timeout_s=300
    )[0]
    timeless = [[{n: v for n, v in line.items() if not TIMES.search(n)} for line in some] for some in (kept, dropped)]
    assert len(kept) == 5
    assert timeless[0] == timeless[1]


@pytest.mark.slow
def test_kl_in_the_loss_or_in_the_reward() -> None:
    """At first there is no KL: only the second iteration differs, and the coefficient adapts in the reward alone."""
    options = ("", "--use_kl_loss --kl_estimator k3 --init_kl_coef 1", "--kl_target 0.001 --kl_horizon 100")
    plain, loss, adaptive = run_ranks(numbers, 2, [f"{RUN} {some}" for some in options], timeout_s=200)[0]
    assert plain[0]["reward"] == loss[0]["reward"] == adaptive[0]["reward"]
    assert loss[1]["kl"] != plain[1]["kl"]
    assert [line["kl_coef"] for line in plain] == [0.01, 0.01]
    assert [line["kl_coef"] for line in adaptive] == pytest.approx([0.01, 0.01 * (1 - 0.2 * 64 / 100)])


@pytest.mark.slow
def test_prompts_and_labels_of_ones_own(tmp_path: Path) -> None:
    """The reward sees the label of each prompt: each is its own, so that half of the answers' labels fit."""
    file = tmp_path / "prompts.jsonl"
    rows = [{"question": f"q{index}", "answer": f"q{index if index % 2 else 0}"} for index in range(1, 65)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = f"{RUN} --prompt_data {file} --input_key question --label_key answer --reward tests.ppo.rules:labelled"
    for lines in run_ranks(numbers, 2, [options], timeout_s=200)[0]:
        assert [line["reward"] for line in lines] == [0.5, 0.5]


@pytest.mark.slow
def test_a_run_begins_where_another_one_ended(tmp_path: Path) -> None:
    """R13: its engine, its actor and its reference are what that one saved. A greedy answer shows every weight."""
    first = f"{RUN} --actor_learning_rate 1e-2 --eval_before_train --eval_every 2 --save_path {tmp_path}"
    second = f"{RUN} --pretrain {tmp_path} --eval_before_train"
    ended, begun = run_ranks(numbers, 2, [first, second], timeout_s=200)[0]
    (before, *_, after), found = ended, begun[0]
    assert (found["eval_reward"], found["eval_response_length"]) == (
        after["eval_reward"],
        after["eval_response_length"],
    )
    assert found["eval_kl"] == begun[1]["kl"] == 0 < after["eval_kl"]
    assert begun[1]["engine_gap"] < 1e-5
    assert before["eval_reward"] != after["eval_reward"], "nothing was trained"
