"""FSDP2, HSDP and ZeRO-3 on all GPUs of a host, and vLLM beside them or on others: what a sync takes, layout by layout.

    python -m benchmarks.scaling [--gpus N] [--layout NAME...] [--json FILE] [--plot PICTURE FILES...] [--small]

The trainer is in fp32, engines are in bf16. Beside each sync, in the same run: a gather of each tensor alone, which is
the least of what a loop over parameters does, a packed all-gather, what a device has to read and write for its worker,
and what must cross links. After each layout every engine says what transformers says. --small tries it on a CPU.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.scaling_layouts import Layout, layouts
from wsync.bench.machine import as_text

ROUNDS, FEW = 12, 2
LOOPBACK = "127.0.0.1"

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}

_HEADS = ("layout", "GB", "ms", "data", "control", "x local", "x link", "x each", "GB/s a GPU", "checks")

Row = Mapping[str, Any]


def measure(layout: Layout, gpus: int, timeout_s: float, *, small: bool) -> Row:
    """One layout, by a process for each rank, all of which are gone afterwards with what they started."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "row.json", Path(folder) / "log.txt"
        with log.open("w") as words:
            port = _free_port()
            ranks = [_start(layout, gpus, rank, port, out, words, small=small) for rank in range(layout.ranks)]
            try:
                _wait(ranks, timeout_s)
            finally:
                for rank in ranks:
                    with suppress(ProcessLookupError):
                        os.killpg(rank.pid, signal.SIGKILL)
                    rank.wait()
        if out.is_file():
            return json.loads(out.read_text())  # type: ignore[no-any-return]
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        return {"case": layout.name, "ok": False, "error": tail}


def _start(
    layout: Layout, gpus: int, rank: int, port: int, out: Path, words: Any, *, small: bool
) -> "subprocess.Popen[bytes]":
    rounds = FEW if small else ROUNDS
    arguments = (layout.name, gpus, rank, port, out, rounds, int(small))
    settings = [f"{name}={value}" for name, value in _SETTINGS.items()]
    if small:  # each of vLLM's workers on a core of its own, if there are as many
        cores = [str(number % (os.cpu_count() or 1)) for number in range(layout.tp)]
        settings.append(f"VLLM_CPU_OMP_THREADS_BIND={'|'.join(cores)}")
    command = ["env", *settings, sys.executable, "-m", "benchmarks.scaling_rank", *map(str, arguments)]
    return subprocess.Popen(command, stdout=words, stderr=subprocess.STDOUT, start_new_session=True)


def _wait(ranks: "Sequence[subprocess.Popen[bytes]]", timeout_s: float) -> None:
    """Until all have ended, one has failed, or for so long."""
    expires = time.monotonic() + timeout_s
    while any(rank.poll() is None for rank in ranks) and not any(rank.returncode for rank in ranks):
        if time.monotonic() > expires:
            return
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def table(rows: Sequence[Row]) -> str:
    """A line for each layout."""
    lines: list[tuple[str, ...]] = [
        ("layout", "GB", "ms", "data", "control", "x local", "x link", "x each", "GB/s a GPU", "checks")
    ]
    lines += [_line(row) for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*shown, *(f"{row['case']}: {row['error']}" for row in rows if "error" in row)])


def _line(row: Row) -> tuple[str, ...]:
    if "seconds" not in row:
        return (row["case"], *[""] * 8, "failed")
    data = _median(row["data samples"])
    references = {name: found["seconds"] for name, found in row["references"].items()}
    checks = row["checks"]

    def times(name: str, seconds: float) -> str:
        return f"{seconds / references[name]:.2f}" if name in references else ""

    return (
        row["case"],
        f"{row['nbytes'] / 1e9:.1f}",
        f"{row['seconds'] * 1e3:.1f}",
        f"{data * 1e3:.1f}",
        f"{_median(row['facts']['control seconds']) * 1e3:.1f}",
        times("local floor", data),
        times("link floor", data),
        times("gather of each tensor", row["seconds"]),
        f"{row['nbytes'] / data / 1e9:.0f}",
        f"{sum(checks.values())} of {len(checks)} right",
    )


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def main(argv: Sequence[str]) -> int:
    """Returns 0 if every check held."""
    options = _parser().parse_args(argv)
    if not (options.small or torch.cuda.is_available()):
        print("benchmarks.scaling needs CUDA devices; --small tries it without", file=sys.stderr)
        return 2
    gpus = options.gpus or torch.cuda.device_count()
    known = {one.name: one for one in layouts(gpus)}
    if unknown := [name for name in options.layout or () if name not in known]:
        print(f"no layout {', '.join(unknown)} on {gpus} GPUs; choose from {', '.join(known)}", file=sys.stderr)
        return 2
    chosen = [known[name] for name in options.layout or known]
    rows = []
    for number, layout in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {layout.name}", file=sys.stderr, flush=True)
        rows.append(measure(layout, gpus, options.timeout_s, small=options.small))
    if options.json:
        options.json.write_text(as_text(gpus=gpus, rows=rows))
    print(table(rows))
    return 0 if rows and all(row["ok"] for row in rows) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("--gpus", type=int, metavar="N", help="a power of two (default: all that there are)")
    parser.add_argument("--layout", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--timeout-s", type=float, default=300.0, metavar="S", help="of one layout (default 300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows as python -m wsync.bench does")
    parser.add_argument("--small", action="store_true", help="small models on a CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
