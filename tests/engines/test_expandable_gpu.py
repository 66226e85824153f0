"""Syncs over CUDA IPC in processes with expandable segments, set by either environment variable, and without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engines.hf_models import FAMILIES, seeded

TIMEOUT_S = 240.0
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def output_of(folder: Path, device: str, transport: str, settings: dict[str, str]) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.expandable_program", str(folder), device, transport],
        env={**kept, **settings},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["", *NAMES])
def test_a_sync_does_not_care(name: str, tmp_path: Path) -> None:
    seeded(FAMILIES["llama"], 0).save_pretrained(tmp_path)
    said = output_of(tmp_path, "cuda", "cuda_ipc", {name: "expandable_segments:True"} if name else {})
    assert f"expandable segments {'on' if name else 'off'}" in said


@pytest.mark.slow
def test_the_program_itself_on_a_cpu(tmp_path: Path) -> None:
    seeded(FAMILIES["llama"], 0).save_pretrained(tmp_path)
    assert "device: host memory" in output_of(tmp_path, "cpu", "shm", {})
