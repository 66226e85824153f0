"""Results that `python -m wsync.bench --json` and `make bench` wrote: cases, and what was measured in the same run."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from wsync.bench import ceilings
from wsync.bench.gpu import cases, gathered, lora, moonshot, nccl_case, sharded_pull
from wsync.bench.gpu.outcome import COPY
from wsync.errors import ConfigError
from wsync.memory.sizes import GIB


class Kind(Enum):
    """What a bar is about."""

    WSYNC = "wsync"
    FLOOR = "bare copies, casts or broadcasts of the same bytes"
    RIVAL = "other ways to update an engine"


_FLOORS = {
    COPY: "one copy on the device",
    lora.MERGES: "the merges by themselves, into float32",
    cases.TWO_COPIES: "two copies on the device",
    cases.CAST: "one pass that reads, casts and writes",
    nccl_case.RAW: "NCCL broadcasts in buffers of 1 GiB",
    gathered.GATHER: "NCCL all-gathers of packed shards, in buckets of 256 MiB",
    sharded_pull.LOCAL: "what a device casts for both workers, by itself",
    sharded_pull.LINK: "the part that crosses the link, by itself",
    sharded_pull.FLOOR: "the longer one of both",
    ceilings.MEMCPY_EACH: "memcpy of each tensor, one thread",
    ceilings.LARGE_MEMCPY: "memcpy in two calls, one thread",
    ceilings.TWO_COPIES: "two copies, one thread",
}
_RIVALS = {
    cases.LOADER: "vLLM's load_weights, called directly",
    cases.EACH: "a handle and a call for each tensor (OpenRLHF)",
    cases.PACKED: "a handle and a call for each bucket of 256 MiB (verl)",
    cases.FLATTENED: "SGLang's flattened_bucket update (slime)",
    moonshot.UPDATE: "Moonshot's checkpoint-engine, from pinned memory",
    moonshot.FROM_DEVICE: "Moonshot's checkpoint-engine, from the device",
    gathered.FULL_EACH: "full_tensor, a handle and a call for each tensor (verl, OpenRLHF)",
    nccl_case.PACKED: "vLLM's own NCCL transfer, packed",
    nccl_case.EACH: "a push of single tensors (TRL)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One thing that was measured."""

    name: str
    seconds: float
    """Median."""

    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case: wsync, and what was measured in turn with it, on the same bytes."""

    title: str
    whole: Bar
    """The whole sync."""

    copies: Bar | None
    """The time of it in which bytes moved, where that was measured."""

    others: tuple[Bar, ...]

    @property
    def bars(self) -> tuple[Bar, ...]:
        """All of them, wsync's first."""
        return (self.whole, *([self.copies] if self.copies else []), *self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One file."""

    about: str
    """Hardware, versions, load, day."""

    measured: tuple[Measured, ...]
    left_out: tuple[str, ...]
    """Cases with a check that failed, and which one. They have no results."""


def read(path: Path) -> Run:
    """What `path` holds. Raises `ConfigError` for a file that the bench did not write."""
    try:
        found = json.loads(path.read_text())
        rows: list[Mapping[str, Any]] = found["rows"]
        about = _about(found, max(row.get("load_average", 0) for row in rows))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a file that the bench wrote: {type(error).__name__}: {error}") from error
    timed = [row for row in rows if _median(row) is not None or row.get("error")]
    faults = [_faults(row) for row in timed]
    return Run(
        about=about,
        measured=tuple(_measured(row) for row, wrong in zip(timed, faults, strict=True) if not wrong),
        left_out=tuple(
            f"{row['case']} ({'; '.join(wrong)})" for row, wrong in zip(timed, faults, strict=True) if wrong
        ),
    )


def _about(found: Mapping[str, Any], load: float) -> str:
    """Hardware, versions, highest load average and day, as one line."""
    hardware, versions = found["hardware"], found["versions"]
    gpus = hardware.get("gpus", [])
    parts = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    parts += [f"{hardware['cores']} cores of {hardware['cpu']}", f"{hardware['memory_bytes'] / GIB:.0f} GiB"]
    parts += [f"{name} {version}" for name, version in versions.items() if version != "not installed"]
    if load:
        parts.append(f"load average up to {load:.1f}")
    return ", ".join([*parts, found["time"][: len("2026-11-30")]])


def _faults(row: Mapping[str, Any]) -> list[str]:
    """Why a row is no result. A target of speed that was missed is none of these."""
    checks = row.get("checks", {})
    faults = [name for name, right in checks.items() if not right]
    if "checks" in row and not checks:
        faults.append("nothing was checked")
    if row.get("wrong"):
        faults.append(f"{len(row['wrong'])} tensors are wrong")
    if row.get("error"):
        faults.append(str(row["error"]).splitlines()[0])
    return faults


def _measured(row: Mapping[str, Any]) -> Measured:
    moved = row.get("data samples")
    ceilings_of_row = row.get("ceilings", {})
    others = {**ceilings_of_row, **row.get("baselines", {}), **row.get("references", {})}
    floors = {name: one for name, one in others.items() if name in ceilings_of_row or name in _FLOORS}
    rivals = {name: one for name, one in others.items() if name not in floors}
    return Measured(
        title=f"{_title(row)}, {row['nbytes'] / 1e9:.3g} GB",
        whole=_bar("wsync", row, Kind.WSYNC),
        copies=Bar(name="wsync, its copies alone", seconds=statistics.median(moved), kind=Kind.WSYNC)
        if moved
        else None,
        others=(
            *(_bar(_FLOORS.get(name, name), one, Kind.FLOOR) for name, one in floors.items()),
            *(_bar(_RIVALS.get(name, name), one, Kind.RIVAL) for name, one in rivals.items()),
        ),
    )


def _title(row: Mapping[str, Any]) -> str:
    name = str(row["case"])
    if name in cases.CASES:
        return cases.CASES[name].about
    return f"{name} over {row['transport']}, {row['producer']}, {row['ranks']} rank(s)" if "producer" in row else name


def _bar(name: str, entry: Mapping[str, Any], kind: Kind) -> Bar:
    return Bar(name=name, seconds=float(_median(entry)), kind=kind)


def _median(entry: Mapping[str, Any]) -> Any:
    """Seconds; None where there are none."""
    return entry.get("median_seconds", entry.get("seconds"))
