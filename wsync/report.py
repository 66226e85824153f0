"""What a sync did: sizes, times, and where the time went."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from wsync.config import MIB

_CONTROL_STAGES = ("begin", "attach", "pause", "open", "go/stop")  # in "finish" devices copy to their end


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """The outcome of one sync, as this trainer rank saw it. Printing it gives a short table."""

    version: int
    """Version that every engine serves now."""

    nbytes: int
    """Payload, in wire dtype, of one copy of the weights."""

    tensors: int
    """Tensors in that payload."""

    seconds: float
    """Wall time of the whole call."""

    pause_seconds: float
    """Time during which this rank's engines did not generate; 0 on a rank that owns none."""

    control_seconds: float
    """Part of `seconds` spent on agreement and engine calls rather than on moving bytes."""

    transport: str
    """Transports used by this rank, or "none" on a rank that sends nothing."""

    stages: Mapping[str, float]
    """Seconds by stage, in the order in which they ran first; nested stages are not counted twice.

    "worker wait", "worker load" and "worker finish" come last, where this rank owns engines: what the slowest of their
    workers spent waiting for buckets, loading, and in the engine's post-load processing. Of weights that are pulled
    "worker read" is how long the copies took, "worker map" how long it took to map memory that is new. Workers run
    beside the other stages, so that these are no part of their sum. "cast" is what this rank took to cast weights
    before workers read them over a link.
    """

    peak_bytes: int
    """Memory that wsync itself held on this rank: slots and staging."""

    pulled_nbytes: int
    """Bytes that the workers of this rank's engines read where trainer ranks have them: in the trainer's dtypes, or in
    the engine's where they were cast before they crossed a link."""

    through_loader: int
    """Tensors that an engine's own loader had to take, because no plain copy expresses them."""

    @property
    def gb_per_s(self) -> float:
        """Payload over wall time, in 1e9 bytes per second."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def to_json(self) -> str:
        """All fields and `gb_per_s` as one JSON object."""
        return json.dumps({**asdict(self), "gb_per_s": self.gb_per_s})

    def __str__(self) -> str:
        head = (
            f"wsync: version {self.version}, {self.tensors} tensors, {self.nbytes / MIB:.1f} MiB over {self.transport} "
            f"in {self.seconds * 1e3:.1f} ms ({self.gb_per_s:.2f} GB/s)"
        )
        rows = [("paused", self.pause_seconds), ("control", self.control_seconds), *self.stages.items()]
        table = [f"  {name:<14}{seconds * 1e3:>10.1f} ms" for name, seconds in rows]
        return "\n".join([head, *table, f"  {'held':<14}{self.peak_bytes / MIB:>10.1f} MiB"])


@dataclass(slots=True)
class Stopwatch:
    """Adds up seconds by stage."""

    started: float = field(default_factory=time.perf_counter)
    stages: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside the block as `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - start

    def add_slowest(self, workers: Iterable[Mapping[str, float]]) -> None:
        """Of each stage of `workers`, seconds by name, the longest, as "worker NAME"."""
        for seconds in workers:
            for name, value in seconds.items():
                self.stages[f"worker {name}"] = max(value, self.stages.get(f"worker {name}", 0.0))

    @property
    def seconds(self) -> float:
        """Seconds since this stopwatch was made."""
        return time.perf_counter() - self.started

    @property
    def control_seconds(self) -> float:
        """Seconds in stages that move no weights."""
        return sum(self.stages.get(name, 0.0) for name in _CONTROL_STAGES)
