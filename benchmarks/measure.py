"""Taking samples inside pytest-benchmark: a case and its references in turn, so that noise hits all of them."""

from collections.abc import Mapping, Sequence

from pytest_benchmark.fixture import BenchmarkFixture

from wsync.bench.ceilings import LARGE_MEMCPY, MEMCPY_EACH, ONE_CAST, bytes_of, cast_way, memcpy_ways
from wsync.bench.samples import Samples, Way, seconds_of

__all__ = [
    "LARGE_MEMCPY",
    "MEMCPY_EACH",
    "ONE_CAST",
    "Samples",
    "TakenElsewhere",
    "Way",
    "bytes_of",
    "cast_way",
    "measure",
    "memcpy_ways",
]


def measure(benchmark: BenchmarkFixture, case: Way, references: Mapping[str, Way], rounds: int) -> Samples:
    """Warm everything up once, then take `rounds` samples of `case` with `references` in between."""
    for way in (*references.values(), case):
        way()
    taken: dict[str, list[float]] = {name: [] for name in references}

    def take() -> None:
        for name, way in references.items():
            taken[name].append(seconds_of(way))

    benchmark.pedantic(case, setup=take, rounds=rounds)  # type: ignore[no-untyped-call]
    take()
    assert benchmark.stats is not None
    return Samples(
        seconds=tuple(benchmark.stats.stats.data), references={name: tuple(times) for name, times in taken.items()}
    )


class TakenElsewhere:
    """A timer for pytest-benchmark that shows seconds that other processes have taken."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """The time, in seconds, since some moment."""
        return self._now

    def show(self, benchmark: BenchmarkFixture, seconds: Sequence[float]) -> None:
        """Enter `seconds` as the samples of a test that has this timer."""
        left = iter(seconds)

        def advance() -> None:
            self._now += next(left)

        benchmark.pedantic(advance, rounds=len(seconds))  # type: ignore[no-untyped-call]
