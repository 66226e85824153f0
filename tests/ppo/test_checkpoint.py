"""A run that goes on from a checkpoint is, bit for bit, the run that never ended."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from integrations.ppo.checkpoint import random_states, set_random_states
from tests.ppo.rank_steps import resumed_with, trained
from wsync.testing.ranks import run_ranks

OPTIONS = "--engine_type hf --steps 4 --save_every 2 --kl_target 6 --kl_horizon 100 --ckpt_dir"


def test_random_states() -> None:
    states = random_states()
    first = (random.random(), np.random.rand(), torch.rand(1))
    set_random_states(states)
    assert (random.random(), np.random.rand(), torch.rand(1)) == first


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding",
    [
        "--fsdp",
        "--zero_stage 3",
        "--fsdp --engine_sleep_level 2",
        pytest.param("--zero_stage 2", marks=pytest.mark.matrix),
        pytest.param("--fsdp --lora_rank 4", marks=pytest.mark.matrix),
        pytest.param("--fsdp --bf16 --use_mp_opt --fsdp_cpu_offload", marks=pytest.mark.matrix),
    ],
)
def test_resume_is_bit_exact(tmp_path: Path, sharding: str) -> None:
    options = f"{sharding} {OPTIONS} {tmp_path}"
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
