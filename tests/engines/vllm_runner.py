"""Runs the programs of these tests, each in a session of its own, so that none of its processes is left behind."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from wsync.testing.processes import end

_SHARED_MEMORY = Path("/dev/shm")


def run_program(
    module: str, arguments: Sequence[object], log: Path, *, ranks: int = 1, TIMEOUT_S: float = 400.0
) -> None:
    """Run `python -m module arguments`, under torchrun if there are several ranks. Fails with the end of its output."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command = [sys.executable, *(launcher if ranks > 1 else ()), "-m", module, *map(str, arguments)]
    before = _segments()
    with log.open("wb") as output:
        program = subprocess.Popen(
            command, env=_environment(module, ranks), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | str = program.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = f"none, ended after {TIMEOUT_S:g} s"
        finally:
            end(program)
            _remove(_segments() - before)
    if code != 0:
        pytest.fail(f"{module}: exit code {code}\n{log.read_text(errors='replace')[-6000:]}", pytrace=False)


def facts_of(
    module: str, models: Path, folder: Path, *, ranks: int = 1, TIMEOUT_S: float = 400.0
) -> list[dict[str, Any]]:
    """What a program that writes JSON found out, by rank."""
    out = folder / "facts.json"
    run_program(module, [models, out], folder / "log.txt", ranks=ranks, TIMEOUT_S=TIMEOUT_S)
    files = [out] if ranks == 1 else [out.with_name(f"{out.name}.{rank}") for rank in range(ranks)]
    return [json.loads(file.read_text()) for file in files]


def _environment(module: str, ranks: int) -> Mapping[str, str]:
    settings = {
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if not module.endswith("_workers"):
        settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if ranks > 1:
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    return {**os.environ, **settings}


def _segments() -> set[Path]:
    """Shared memory that vLLM's CPU build makes for tensor parallelism; a killed worker leaves it behind."""
    return set(_SHARED_MEMORY.glob("*cpushm*"))


def _remove(segments: set[Path]) -> None:
    for segment in segments:
        if not _is_mapped(segment):
            segment.unlink(missing_ok=True)


def _is_mapped(segment: Path) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(segment) in maps.read_text():
                return True
        except OSError:
            continue  # that process has ended
    return False
