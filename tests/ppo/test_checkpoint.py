"""A run that goes on from a checkpoint is, bit for bit, the run that never ended."""

import random
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from integrations.ppo.arguments import Arguments
from integrations.ppo.checkpoint import Checkpoints, random_states, set_random_states
from integrations.ppo.errors import ConflictError
from tests.ppo.jobs import SMALL, run
from tests.ppo.rank_steps import resumed_with, trained
from wsync.testing.ranks import run_ranks

REWARD = "--reward integrations.ppo.toy:lowercase_fraction tests.ppo.rules:drawing"
"""By which every random state moves on."""

OPTIONS = f"--engine_type hf --steps 4 --save_every 2 --kl_target 6 --kl_horizon 100 {REWARD} --ckpt_dir"
SCHEDULED = "--lr_scheduler linear --lr_warmup_steps 3 --ema_decay 0.5"


def test_random_states() -> None:
    states = random_states()
    first = (random.random(), np.random.rand(), torch.rand(1))
    set_random_states(states)
    assert (random.random(), np.random.rand(), torch.rand(1)) == first


@pytest.mark.parametrize("scheduler", ["constant", "linear"])
def test_what_may_be_another_after_a_resume(tmp_path: Path, scheduler: str) -> None:
    """Neither ranks nor what a step does; steps, unless the learning rate counts them."""
    args, loaded = Arguments(ckpt_dir=str(tmp_path), lr_scheduler=scheduler), list[Any]()
    state = {"world_size": 2, "arguments": asdict(args), "trainer": {"step": 2}, "random": random_states()}
    (tmp_path / "step_000002").mkdir()
    torch.save(state, tmp_path / "step_000002" / "rank_0.pt")
    trainer: Any = SimpleNamespace(load_state_dict=loaded.append)

    def load(world_size: int, **changed: Any) -> bool:
        strategy: Any = SimpleNamespace(world_size=world_size, rank=0, enter=loaded.append, load_ckpt=loaded.append)
        return Checkpoints(replace(args, **changed), strategy).load(trainer)

    for ranks, changed, words in ((1, {}, "by 2 ranks; these are 1"), (2, {"seed": 3}, "--seed 0, now 3")):
        with pytest.raises(ConflictError, match=words):
            load(ranks, **changed)
    if scheduler == "linear":
        with pytest.raises(ConflictError, match="--steps 40, now 50"):
            load(2, steps=50)
    assert loaded == []
    assert load(2, **({"steps": 50} if scheduler == "constant" else {"eval_every": 1}))
    assert loaded == ["train", tmp_path / "step_000002", {"step": 2}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding",
    [
        "--fsdp",
        "--zero_stage 3",
        f"--fsdp --engine_sleep_level 2 {SCHEDULED}",
        pytest.param("--zero_stage 2", marks=pytest.mark.matrix),
        pytest.param("--fsdp --lora_rank 4", marks=pytest.mark.matrix),
        pytest.param("--fsdp --bf16 --use_mp_opt --fsdp_cpu_offload", marks=pytest.mark.matrix),
    ],
)
def test_resume_is_bit_exact(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, sharding: str) -> None:
    options = f"{sharding} {OPTIONS} {tmp_path}"
    if "--ema_decay" in sharding:
        options += f" --save_path {tmp_path_factory.mktemp('trained')}"
    whole = run_ranks(trained, 2, options, timeout_s=200)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_000002", "step_000004"]
    shutil.rmtree(tmp_path / "step_000004")
    (tmp_path / "step_000009.partial").mkdir()  # as a run leaves it that was killed while it wrote
    resumed = run_ranks(trained, 2, options, timeout_s=200)
    for rank in range(2):
        assert whole[rank]["first step"] == 0
        assert resumed[rank]["first step"] == 2
        assert resumed[rank]["before"] != whole[rank]["before"]
        assert resumed[rank]["after"] == whole[rank]["after"]
    said = run_ranks(resumed_with, 2, f"{options} --gamma 0.5", timeout_s=200)
    assert all("--gamma 1.0, now 0.5" in words for words in said)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.vllm
def test_resume_with_vllm_is_bit_exact(tmp_path: Path) -> None:
    """Its answers belong to weights, prompts and seeds, and not to what it answered before."""
    options = f"--fsdp --engine_type vllm {SMALL} --steps 4 --save_every 2 --ckpt_dir {tmp_path / 'checkpoints'}"
    whole = run(tmp_path / "whole", options, "--save_path", str(tmp_path / "first"))
    shutil.rmtree(tmp_path / "checkpoints" / "step_000004")
    resumed = run(tmp_path / "resumed", options, "--save_path", str(tmp_path / "second"))
    lines = [*whole[2:], *resumed]
    timeless = [{n: v for n, v in one.items() if not re.match("seconds|sync_share", n)} for one in lines]
    assert [one["step"] for one in timeless] == [3, 4, 3, 4]
    assert timeless[:2] == timeless[2:]
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
