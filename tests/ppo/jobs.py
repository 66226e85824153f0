"""Runs of the trainer on two ranks, each ended by its deadline, and what they wrote."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.engines.vllm_runner import run_program

SMALL = "--rollout_batch_size 64 --train_batch_size 32 --micro_train_batch_size 16 --micro_rollout_batch_size 32"
"""Sizes of the run in README.md."""


def run(
    folder: Path, options: str, *more: str, module: str = "integrations.ppo.train", timeout_s: float = 400.0
) -> list[dict[str, Any]]:
    """Train with `options` and `more`; the lines of its metrics.jsonl. Fails with the end of its output."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments: Sequence[str] = [*options.split(), *more, "--log_dir", str(folder)]
    run_program(module, arguments, folder / "log.txt", ranks=2, TIMEOUT_S=timeout_s)
    return lines(folder)


def lines(folder: Path) -> list[dict[str, Any]]:
    """What was logged, in order."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
