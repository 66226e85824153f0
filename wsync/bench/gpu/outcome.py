"""What came of one case: seconds beside those of its references, and what was checked."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from wsync.bench.samples import Samples, Way

COPY = "device copy"
"""Name of the reference `copies(nbytes, 1)`."""

WARM_UP = 4
"""Rounds of `in_turn` that do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """At most `factor` times the seconds of a reference."""

    reference: str
    factor: float
    data: bool = False
    """Whether it is for the time in which bytes moved; else for the whole call."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Filled in as the case goes on."""

    case: str
    tensors: int = 0
    nbytes: int = 0
    samples: Samples | None = None
    data_seconds: list[float] = field(default_factory=list)
    """Of the calls that were sampled, the time in which bytes moved, where that was measured."""

    limits: tuple[Limit, ...] = ()
    checks: dict[str, bool] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)

    def seconds(self, limit: Limit) -> float:
        """What `limit` is for, median."""
        assert self.samples is not None
        return statistics.median(self.data_seconds) if limit.data else self.samples.median_s

    def over(self, limit: Limit) -> float:
        """How many times the seconds of the reference the case took, median."""
        assert self.samples is not None
        return self.seconds(limit) / self.samples.reference_median_s(limit.reference)

    @property
    def ok(self) -> bool:
        """Whether every check holds. A limit that is not kept is shown, and is no failure: machines differ."""
        return bool(self.checks) and all(self.checks.values())

    def as_json(self) -> dict[str, object]:
        """Plain data, times in seconds."""
        shown: dict[str, object] = {
            "case": self.case,
            "tensors": self.tensors,
            "nbytes": self.nbytes,
            "checks": self.checks,
            "facts": self.facts,
            "ok": self.ok,
        }
        if self.samples is not None:
            shown["seconds"] = self.samples.median_s
            shown["samples"] = self.samples.seconds
            shown["data samples"] = self.data_seconds
            shown["references"] = {
                name: {"seconds": statistics.median(seconds), "samples": seconds}
                for name, seconds in self.samples.references.items()
            }
            shown["limits"] = [
                {
                    "of": limit.reference,
                    "at_most": limit.factor,
                    "is": self.over(limit),
                    "seconds": self.seconds(limit),
                    "data": limit.data,
                }
                for limit in self.limits
            ]
        return shown


def seconds_on_device(way: Way) -> float:
    """Wall time of one call and of all device work that it queued."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    way()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turn(
    way: Way, references: Mapping[str, Way], rounds: int, seconds_of: Callable[[Way], float] = seconds_on_device
) -> Samples:
    """Sample `way` and its references one after the other, after some rounds that do not count."""
    for _ in range(WARM_UP):
        for each in (way, *references.values()):
            each()
    before = [{name: seconds_of(each) for name, each in references.items()}]
    seconds = []
    for _ in range(rounds):
        seconds.append(seconds_of(way))
        before.append({name: seconds_of(each) for name, each in references.items()})
    return Samples(
        seconds=tuple(seconds),
        references={name: tuple(sample[name] for sample in before) for name in references},
    )


def copies(nbytes: int, times: int) -> Callable[[], None]:
    """Copying as many bytes on the device, `times` times in a row."""
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(times):
            target.copy_(source)

    return run


def cast(numel: int, source_type: torch.dtype, target_type: torch.dtype) -> Callable[[], None]:
    """Reading as many elements once, and writing them once in the other dtype."""
    source = torch.empty(numel, dtype=source_type, device="cuda").uniform_(-1, 1)
    target = torch.empty(numel, dtype=target_type, device="cuda")

    def run() -> None:
        target.copy_(source)

    return run
