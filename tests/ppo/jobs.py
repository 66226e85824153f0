"""Runs of the trainer on two ranks, each ended by its deadline, and what they wrote."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang_runner import STUBS
from tests.engines.vllm_runner import run_program

SMALL = "--rollout_batch_size 64 --train_batch_size 32 --micro_train_batch_size 16 --micro_rollout_batch_size 32"
"""Sizes of the run in README.md."""


def run(
    folder: Path, options: str, *more: str, module: str = "integrations.ppo.train", timeout_s: float = 560.0
) -> list[dict[str, Any]]:
    """Train with `options` and `more`; the lines of its metrics.jsonl. Fails with the end of its output."""
    folder.mkdir(parents=True, exist_ok=True)
    run_ranks_of(module, [*options.split(), *more, "--log_dir", str(folder)], folder / "log.txt", timeout_s=timeout_s)
    return lines(folder)


def run_ranks_of(module: str, arguments: Sequence[str], log: Path, *, timeout_s: float = 560.0) -> None:
    """A program on two ranks, with SGLang on this CPU if they name it."""
    with pytest.MonkeyPatch.context() as patch:
        if "sglang" in arguments:
            _sglang_on_cpu(patch)
        run_program(module, arguments, log, ranks=2, TIMEOUT_S=timeout_s)


def _sglang_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """As the README says. SGLang imports 3,000 modules in each process, which takes a minute without their bytecode."""
    patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(STUBS), os.environ.get("PYTHONPATH", "")])))
    patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    patch.setenv("SGLANG_PLUGINS", "wsync")


def lines(folder: Path) -> list[dict[str, Any]]:
    """What was logged, in order."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
