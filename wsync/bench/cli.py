"""The command line: what to measure, and where the results go."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path

import torch

from wsync import registry
from wsync.bench.actors import PRODUCERS
from wsync.bench.cases import CASES
from wsync.bench.job import Job, Row
from wsync.bench.machine import as_text, free_bytes
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
        for name, about in _listed(options.suite):
            print(f"{name:<14}{about}")
        return 0
    if options.suite == "gpu":
        return _run_gpu_suite(options)
    try:
        jobs = _jobs(options, fault)
        for path in [options.plot] if options.plot else []:
            check_plot(path)
        _check_json(options.json)
    except WsyncError as error:
        return _misused(error)
    rows = _measure(jobs)
    table(rows, sys.stderr if options.json == "-" else sys.stdout)
    if options.json:
        compared = [{"of": of, "ratio": ratio} for of, ratio in tiny_to_large(rows)]
        _write({"tiny_to_large": compared, "rows": [row.as_json() for row in rows]}, options.json)
    if options.plot:
        plot(rows, options.plot)
    return 0 if all(row.ok for row in rows) else WRONG


def _run_gpu_suite(options: argparse.Namespace) -> int:
    from wsync.bench.gpu import suite

    try:
        names = suite.choose(options.case)
        _check_json(options.json)
        _check_gpu_options(options)
    except WsyncError as error:
        return _misused(error)
    for line in [] if options.case else suite.left_out(names):
        print(line, file=sys.stderr)
    results = []
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", file=sys.stderr, flush=True)
        results.append(suite.measure(name, options.timeout_s))
        if options.json not in (None, "-"):  # a case can take minutes: what is known is kept
            _write({"rows": results}, options.json)
    suite.table(results, sys.stderr if options.json == "-" else sys.stdout)
    if options.json == "-":
        _write({"rows": results}, options.json)
    return 0 if all(result["ok"] for result in results) else WRONG


def _check_gpu_options(options: argparse.Namespace) -> None:
    """Raises `ConfigError` for what only the host suite heeds."""
    plain = vars(_parser().parse_args([]))
    heeded = ("suite", "case", "json", "timeout_s", "list")
    odd = [name for name, value in vars(options).items() if name not in heeded and value != plain[name]]
    if odd:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in odd)
        raise ConfigError(f"the GPU suite has models, transports and slots of its own; leave out {names}")


def _listed(suite: str) -> list[tuple[str, str]]:
    if suite == "host":
        return [(case.name, case.about) for case in CASES.values()]
    from wsync.bench.gpu.cases import CASES as GPU_CASES

    return [(name, case.about) for name, case in GPU_CASES.items()]


def _misused(error: WsyncError) -> int:
    print(f"python -m wsync.bench: {error}", file=sys.stderr)
    return MISUSED


def _check_json(where: str | None) -> None:
    if where not in (None, "-") and not Path(where).parent.is_dir():
        raise ConfigError(f"--json {where}: there is no folder {Path(where).parent}")


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
    unknown = [case for case in options.case or () if case not in CASES]
    if unknown:
        raise ConfigError(f"unknown cases {unknown}; choose from {', '.join(CASES)}")
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
            options.case or CASES, options.producer, options.ranks, options.transport, options.bucket_mib
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


def _write(found: Mapping[str, object], where: str) -> None:
    text = as_text(**found)
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
    add("--suite", choices=("host", "gpu"), default="host", help="gpu: real engines on a CUDA device (default host)")
    add("--case", nargs="+", metavar="NAME", help=f"default: all; of the host suite: {', '.join(CASES)}")
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
