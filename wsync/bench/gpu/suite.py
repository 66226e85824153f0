"""All cases, one process each, and the table."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from wsync.bench.gpu.cases import CASES
from wsync.errors import ConfigError

Result = Mapping[str, Any]

_HEADS = ("case", "tensors", "GB", "ms", "against", "is", "at most", "checks")


def choose(names: Sequence[str] | None) -> list[str]:
    """Names of cases; by default those whose packages are there.

    Raises `ConfigError` for an unknown one, without a GPU or with too few for a named one, if a package of a named one
    is not there, or no engine is.
    """
    import torch

    unknown = [name for name in names or () if name not in CASES]
    if unknown:
        raise ConfigError(f"unknown GPU cases {unknown}; choose from {', '.join(CASES)}")
    if not torch.cuda.is_available():
        raise ConfigError("the GPU suite needs a CUDA device, and torch sees none")
    gpus = torch.cuda.device_count()
    many = [f"{name}: {CASES[name].gpus}" for name in names or () if CASES[name].gpus > gpus]
    if many:
        raise ConfigError(f"these cases need more GPUs than the {gpus} that torch sees: {', '.join(many)}")
    lacking = {name: _lacking(name) for name in names or CASES if CASES[name].gpus <= gpus}
    found = [name for name, packages in lacking.items() if not packages]
    if names and len(found) < len(lacking):
        raise ConfigError(f"these cases need {_joined(lacking.values())}: not installed")
    if not found:
        raise ConfigError(f"these cases need {_joined([case.needs[:1] for case in CASES.values()])}: not installed")
    return found


def left_out(names: Sequence[str]) -> list[str]:
    """A line for each case that is not among `names` for want of a package, but could be with the engine that is."""
    lines = []
    for name, case in CASES.items():
        lacking = _lacking(name)
        if name not in names and lacking and case.needs[0] not in lacking:
            lines.append(f"left out: {name}; pip install {' '.join(package.replace('_', '-') for package in lacking)}")
    return lines


def _lacking(name: str) -> list[str]:
    return [package for package in CASES[name].needs if importlib.util.find_spec(package) is None]


def _joined(packages: Iterable[Sequence[str]]) -> str:
    return " and ".join(sorted({package for some in packages for package in some}))


def measure(name: str, timeout_s: float) -> Result:
    """Run one case in a process of its own, which is gone afterwards with all that it started."""
    case = CASES[name]
    settings = (
        f"VLLM_ENABLE_V1_MULTIPROCESSING={int(case.separate)}",
        "VLLM_USE_FLASHINFER_SAMPLER=0",
        "VLLM_LOGGING_LEVEL=ERROR",
        "GLOO_SOCKET_IFNAME=lo",
        "NCCL_SOCKET_IFNAME=lo",
    )
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "outcome.json", Path(folder) / "log.txt"
        with log.open("w") as words:
            process = subprocess.Popen(
                ["env", *settings, sys.executable, "-m", "wsync.bench.gpu.one", name, str(out)],
                stdout=words,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | str = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = f"nothing within {timeout_s:g} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if out.is_file():
            return json.loads(out.read_text())  # type: ignore[no-any-return]
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        return {"case": name, "ok": False, "error": f"ended with {code}:\n{tail}"}


def table(results: Sequence[Result], out: TextIO) -> None:
    """A line for each reference that has a limit, and below them what failed."""
    lines = [_HEADS, *(line for result in results for line in _lines(result))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADS))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), file=out)
    for result in results:
        failed = [check for check, right in result.get("checks", {}).items() if not right]
        if failed:
            print(f"{result['case']}: WRONG: {', '.join(failed)}", file=out)
        if "error" in result:
            print(f"{result['case']}: {result['error']}", file=out)


def _lines(result: Result) -> list[tuple[str, ...]]:
    checks = result.get("checks", {})
    right = f"{sum(checks.values())} of {len(checks)} right" if checks else "failed"
    head = (result["case"], str(result.get("tensors", "")), f"{result.get('nbytes', 0) / 1e9:.1f}")
    if not result.get("limits"):
        return [(*head, "", "", "", "", right)]
    return [
        (
            *head,
            f"{limit['seconds'] * 1e3:.1f}{' data' if limit['data'] else ''}",
            str(limit["of"]),
            f"{limit['is']:.2f}",
            f"{limit['at_most']:.2f}",
            right,
        )
        for limit in result["limits"]
    ]
