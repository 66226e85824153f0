"""One row to measure, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from statistics import median

import torch

from wsync.bench.cases import CASES, Shapes, numel_of
from wsync.bench.ceilings import MEMCPY_EACH, ONE_CAST, TWO_COPIES
from wsync.bench.machine import load_average
from wsync.bench.samples import Samples
from wsync.testing.chaos import Fault

LINK = "raw broadcast"
"""The same bytes over gloo, a bucket at a time, and nothing else."""

_COLLECTIVE = ("gloo",)
_SHARDED = ("fsdp2", "fsdp1", "zero3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to measure. Plain data: it goes to other processes."""

    case: str
    transport: str
    producer: str
    ranks: int
    """Trainer ranks; the first one owns the engine."""

    bucket_bytes: int
    scale: float
    actor_dtype: torch.dtype
    dtype: torch.dtype
    """Of the engine, and so on the wire."""

    rounds: int
    """Timed syncs, each between samples of the ceilings."""

    baselines: bool
    timeout_s: float
    """For all of it; whoever still runs then is ended."""

    fault: Fault | None = None
    """What goes wrong in the last timed sync. The row must then come out wrong."""

    @property
    def shapes(self) -> Shapes:
        """Names and shapes of all tensors."""
        return CASES[self.case].shapes(self.scale)

    @property
    def remote(self) -> bool:
        """Whether the engine is in a process of its own."""
        return self.transport != "inproc"

    @property
    def nbytes(self) -> int:
        """Payload of one sync, in wire dtype."""
        return numel_of(self.shapes) * self.dtype.itemsize

    @property
    def one_pass(self) -> str:
        """Name of the ceiling that reads every element once and writes it once."""
        return MEMCPY_EACH if self.actor_dtype == self.dtype else ONE_CAST

    @property
    def floor(self) -> str:
        """Name of the ceiling that this transport is held against."""
        return LINK if self.transport in _COLLECTIVE else TWO_COPIES if self.remote else self.one_pass

    @property
    def needed_bytes(self) -> int:
        """Memory that all processes of this row need at most, roughly."""
        numel = numel_of(self.shapes)
        copies = self.ranks * (2 if self.producer in _SHARDED else 1) + (self.producer != "module")
        slots = 4 * min(self.bucket_bytes, self.nbytes)
        return numel * self.actor_dtype.itemsize * copies + 3 * self.nbytes + slots

    def __str__(self) -> str:
        return (
            f"{self.case} over {self.transport}, {self.producer}, {self.ranks} rank(s), "
            f"buckets of {self.bucket_bytes / (1 << 20):g} MiB"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the first rank measured."""

    samples: Samples
    """Of the syncs and of the ceilings."""

    loops: Mapping[str, tuple[float, ...]]
    """Seconds of each baseline."""

    stages: Mapping[str, float]
    """Seconds by stage, of the sync that took the median time."""

    through_loader: int
    """Tensors that no plain copy expresses."""

    wrong: tuple[str, ...]
    """Tensors whose bytes at the receiver are not the actor's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A job and its outcome."""

    job: Job
    taken: Taken | None = None
    error: str = ""
    """Why there is no outcome."""

    load_average: float = field(default_factory=load_average)

    @property
    def ok(self) -> bool:
        """Whether it ran and every byte was right."""
        return self.taken is not None and not self.taken.wrong

    @property
    def ratio_to_floor(self) -> float | None:
        """Seconds of a sync over seconds of the floor beside it, median."""
        return None if self.taken is None else 1 / self.taken.samples.ratio(self.job.floor)

    @property
    def ns_per_byte(self) -> float | None:
        """Median time a byte."""
        return None if self.taken is None else 1e9 * self.taken.samples.median_s / self.job.nbytes

    @property
    def baselines(self) -> dict[str, dict[str, float]]:
        """Name -> "seconds", median, and "ratio": how many times as long as a sync that is."""
        if self.taken is None:
            return {}
        own = self.taken.samples.median_s
        medians = {name: median(seconds) for name, seconds in self.taken.loops.items()}
        return {name: {"seconds": seconds, "ratio": seconds / own} for name, seconds in medians.items()}

    def as_json(self) -> dict[str, object]:
        """Plain data, with every sample."""
        job = self.job
        plain: dict[str, object] = {
            one.name: _plain(getattr(job, one.name)) for one in fields(job) if one.name not in ("fault", "baselines")
        }
        plain |= {"tensors": len(job.shapes), "nbytes": job.nbytes, "load_average": self.load_average}
        plain |= {"ok": self.ok, "error": self.error, "floor": job.floor, "baselines": self.baselines}
        if self.taken is None:
            return plain | dict.fromkeys(("seconds", "gb_per_s", "floor_seconds", "ratio_to_floor"))
        samples = self.taken.samples
        return plain | {
            "seconds": samples.median_s,
            "samples": samples.seconds,
            "gb_per_s": job.nbytes / samples.median_s / 1e9,
            "floor_seconds": samples.reference_median_s(job.floor),
            "ratio_to_floor": self.ratio_to_floor,
            "ceilings": {
                name: {"seconds": samples.reference_median_s(name), "samples": seconds, "ratio": samples.ratio(name)}
                for name, seconds in samples.references.items()
            },
            "stages": dict(self.taken.stages),
            "through_loader": self.taken.through_loader,
            "wrong": list(self.taken.wrong),
        }


def _plain(value: object) -> object:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
