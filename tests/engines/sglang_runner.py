"""Runs the programs of these tests. A failing engine ends its whole process tree, so each has a session of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

STUBS = Path(__file__).parents[1] / "stubs"
TIMEOUT_S = 500.0


def run(command: Sequence[object], log: Path, *, tp: int = 1, plugin: bool = True) -> str:
    """Run `python command`, with SGLang's CPU path switched on. Returns its output, or fails with the end of it."""
    with log.open("wb") as output:
        program = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=_environment(tp, plugin),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = program.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = f"none, ended after {TIMEOUT_S:g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
    text = log.read_text(errors="replace")
    if code != 0:
        pytest.fail(f"{command}: exit code {code}\n{text[-6000:]}", pytrace=False)
    return text


def facts_of(models: Path, folder: Path, kind: str, parts: str, *, tp: int = 1, way: str = "plugin") -> dict[str, Any]:
    """What `sglang_program` found out; see there."""
    out = folder / "facts.json"
    command = ["-m", "tests.engines.sglang_program", models, out, kind, parts, tp, way]
    run(command, folder / "log.txt", tp=tp, plugin=way == "plugin")
    facts: dict[str, Any] = json.loads(out.read_text())
    return facts


def _environment(tp: int, plugin: bool) -> Mapping[str, str]:
    paths = [str(STUBS), os.environ.get("PYTHONPATH", "")]
    settings = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tp))),
        "SGLANG_PLUGINS": "wsync" if plugin else "none",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    # SGLang imports 3,000 modules in each of three processes: without their bytecode that takes a minute.
    return {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | settings
