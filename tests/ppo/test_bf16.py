"""In bfloat16 actor and engine round in their own ways: right after a sync the engine is what a fresh one would be."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ppo.jobs import SMALL, run_ranks_of
from tests.ppo.rank_steps import beside_fresh, numbers
from wsync.testing.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding",
    [
        "--fsdp",
        pytest.param("--zero_stage 2", marks=pytest.mark.matrix),
        pytest.param("--fsdp --lora_rank 16 --actor_learning_rate 1e-2", marks=pytest.mark.matrix),
    ],
)
def test_an_engine_after_a_sync_is_a_fresh_one(sharding: str) -> None:
    """The fresh one starts from what `--save_path` gets: LoRA is merged there as well."""
    options = f"{sharding} --bf16 --engine_type hf --steps 1"
    found = run_ranks(beside_fresh, 2, options, timeout_s=200)
    for facts in found:
        assert facts["ours"] == facts["theirs"]
    assert found[0]["ours"][1] != found[1]["ours"][1]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("sharding", "engine"),
    [
        pytest.param("--fsdp", "--engine_type vllm", marks=pytest.mark.vllm),
        pytest.param("--zero_stage 2", "--engine_type sglang --engine_tp_size 2", marks=pytest.mark.sglang),
    ],
)
def test_real_engines_after_a_sync_are_fresh_ones(tmp_path: Path, sharding: str, engine: str) -> None:
    """Started on what was trained, by their own loaders, in processes of their own."""
    saved = str(tmp_path / "saved")
    common = f"{sharding} {engine} {SMALL} --bf16".split()
    runs = {
        "trained": ["--steps", "2", "--save_path", saved, "--actor_learning_rate", "1e-2"],
        "fresh": ["--pretrain", saved],
    }
    found: dict[str, list[Any]] = {}
    for kind, options in runs.items():
        out = tmp_path / kind
        out.mkdir()
        run_ranks_of("tests.ppo.engine_program", [kind, str(out), *common, *options], out / "log.txt")
        found[kind] = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
    for trained, fresh in zip(found["trained"], found["fresh"], strict=True):
        assert trained["after"] == fresh["after"]
        assert trained["after"] != trained["before"], "nothing was trained, and this shows nothing"


@pytest.mark.slow
def test_bfloat16_weights_train_as_float32_ones() -> None:
    """One micro-batch a step, so that the gradients are the same; then models drift apart by what clipping rounds."""
    run = "--fsdp --bf16 --engine_type hf --steps 2 --max_epochs 1"
    plain, masters = run_ranks(numbers, 2, [run, f"{run} --use_mp_opt"], timeout_s=200)[0]
    for one, other in zip(plain, masters, strict=True):
        for name in ("reward", "value_loss", "actor_grad_norm", "critic_grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=0.02, abs=1e-4), name


@pytest.mark.slow
def test_the_actor_is_close() -> None:
    for lines in run_ranks(numbers, 2, ["--fsdp --bf16 --engine_type hf --steps 2"], timeout_s=200)[0]:
        assert [line["engine_gap"] for line in lines] == pytest.approx([0, 0], abs=0.05)
