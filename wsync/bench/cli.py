"""The command line: what to measure, and where the results go."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from itertools import product
from pathlib import Path

import torch

from wsync import registry
from wsync.bench.actors import PRODUCERS
from wsync.bench.cases import CASES
from wsync.bench.job import Job, Row
from wsync.bench.machine import free_bytes, hardware, versions
from wsync.bench.plot import check_plot, plot
from wsync.bench.run import measure, prepare
from wsync.bench.show import progress, table, tiny_to_large
from wsync.config import MIB, SyncConfig
from wsync.errors import ConfigError, WsyncError
from wsync.testing.chaos import Fault
from wsync.topology import Topology, local_endpoint

WRONG, MISUSED = 1, 2
"""Exit codes: a row failed or has a wrong byte; the arguments make no sense."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TRANSPORTS = ("inproc", "shm", "gloo")


def main(argv: Sequence[str] | None = None, *, fault: Fault | None = None) -> int:
    """Measure, show, write down.

    Args:
        argv: arguments; None: those of this process.
        fault: what goes wrong in every row on purpose, to see that it is found.

    Returns:
        0 if every row ran and every byte was right, else `WRONG`; `MISUSED`, with a message, for bad arguments.
    """
    options = _parser().parse_args(argv)
    if options.list:
        for case in CASES.values():
            print(f"{case.name:<12}{case.about}")
        return 0
    try:
        jobs = _jobs(options, fault)
        for path in [options.plot] if options.plot else []:
            check_plot(path)
        if options.json not in (None, "-") and not Path(options.json).parent.is_dir():
            raise ConfigError(f"--json {options.json}: there is no folder {Path(options.json).parent}")
    except WsyncError as error:
        print(f"python -m wsync.bench: {error}", file=sys.stderr)
        return MISUSED
    rows = _measure(jobs)
    table(rows, sys.stderr if options.json == "-" else sys.stdout)
    if options.json:
        _write(rows, options.json)
    if options.plot:
        plot(rows, options.plot)
    return 0 if all(row.ok for row in rows) else WRONG


def _measure(jobs: Sequence[Job]) -> list[Row]:
    prepare()
    rows = []
    with progress() as shown:
        for number, job in enumerate(jobs, 1):
            on_progress = shown.start(job, number, len(jobs))
            rows.append(measure(job, on_progress))
            on_progress("done" if rows[-1].ok else "FAILED", 1, 1)
    return rows


def _jobs(options: argparse.Namespace, fault: Fault | None) -> list[Job]:
    """One job for each combination. Raises `ConfigError` or `UnsupportedError` for what cannot be measured here."""
    for name in options.transport:
        _check_transport(name)
    dtype = _DTYPES[options.dtype]
    found = [
        Job(
            case=case,
            transport=transport,
            producer=producer,
            ranks=ranks,
            bucket_bytes=SyncConfig(bucket_bytes=round(mib * MIB)).bucket_bytes,
            scale=options.scale or CASES[case].auto_scale(dtype.itemsize),
            actor_dtype=_DTYPES[options.actor_dtype],
            dtype=dtype,
            rounds=options.rounds,
            baselines=not options.no_baselines,
            timeout_s=options.timeout_s,
            fault=fault,
        )
        for case, producer, ranks, transport, mib in product(
            options.case, options.producer, options.ranks, options.transport, options.bucket_mib
        )
    ]
    free = free_bytes()
    for job in found:
        if free is not None and job.needed_bytes > free:
            raise ConfigError(
                f"{job}: needs about {job.needed_bytes / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; "
                f"the scale is {job.scale:g}, pass a smaller --scale"
            )
    return found


def _check_transport(name: str) -> None:
    here = local_endpoint("cpu")
    reason = registry.transport(name).refuse(Topology(sender=here, receivers=(here,)))
    if reason is not None:
        raise ConfigError(f"transport {name!r} cannot be measured here: {reason}")


def _write(rows: Sequence[Row], where: str) -> None:
    content = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "tiny_to_large": [{"of": of, "ratio": ratio} for of, ratio in tiny_to_large(rows)],
        "rows": [row.as_json() for row in rows],
    }
    text = json.dumps(content, indent=1) + "\n"
    if where == "-":
        with suppress(BrokenPipeError):
            sys.stdout.write(text)
    else:
        Path(where).write_text(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wsync.bench",
        description="Time weight syncs into a bare receiver, beside the floor of this machine and per-tensor loops.",
    )
    add = parser.add_argument
    add("--list", action="store_true", help="list the cases and end")
    add("--case", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="NAME", help=", ".join(CASES))
    add("--transport", nargs="+", default=list(_TRANSPORTS), metavar="NAME", help="default: inproc shm gloo")
    add("--producer", nargs="+", choices=PRODUCERS, default=["module"], metavar="KIND", help=", ".join(PRODUCERS))
    add("--ranks", nargs="+", type=_count, default=[1], metavar="N", help="trainer ranks")
    default_mib = SyncConfig().bucket_bytes / MIB
    add("--bucket-mib", nargs="+", type=_size, default=[default_mib], metavar="MIB", help="bytes of one slot, in MiB")
    add("--scale", type=_scale, help="share of a case's bytes, in as many tensors; default: 1, or what makes 256 MiB")
    add("--dtype", choices=_DTYPES, default="bf16", help="of the engine (default bf16)")
    add("--actor-dtype", choices=_DTYPES, default="fp32", help="of the trainer (default fp32)")
    add("--rounds", type=_count, default=5, metavar="N", help="timed syncs a row (default 5)")
    add("--no-baselines", action="store_true", help="leave the per-tensor loops out")
    add("--timeout-s", type=_size, default=600.0, metavar="S", help="most seconds a row may take (default 600)")
    add("--json", metavar="FILE", help="write the rows; - for stdout")
    add("--plot", type=Path, metavar="FILE", help="draw the rows; .png, .svg or .pdf")
    return parser


def _count(text: str) -> int:
    value = _number(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(value)


def _size(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _scale(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None
