"""Taking samples on a machine that is not quiet: a case and its references in turn, so that noise hits all of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pytest_benchmark.fixture import BenchmarkFixture

Way = Callable[[], object]

MEMCPY_EACH = "memcpy"
"""The C library's memcpy on one thread, a call for each tensor: weights do not lie in one piece."""

ONE_CAST = "one cast"
"""Every element read once and written once in the other dtype, by torch on one thread, a call for each tensor."""

LARGE_MEMCPY = "memcpy of halves"
"""As many bytes in two calls. Above some size, 192 MiB on some machines, memcpy writes round the cache: quicker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Seconds of a case, and of each reference just before every sample and after the last one."""

    seconds: tuple[float, ...]
    references: Mapping[str, tuple[float, ...]]
    """By name, one more sample each than `seconds`."""

    @property
    def median_s(self) -> float:
        """Of the case."""
        return statistics.median(self.seconds)

    def reference_median_s(self, name: str) -> float:
        """Of one reference."""
        return statistics.median(self.references[name])

    def ratios(self, name: str) -> list[float]:
        """Seconds of the reference, mean of before and after, over seconds of the case: sample by sample."""
        around = self.references[name]
        return [
            (before + after) / 2 / own for before, after, own in zip(around, around[1:], self.seconds, strict=False)
        ]

    def ratio(self, name: str) -> float:
        """Median of `ratios`: above 1 the case is faster than the reference."""
        return statistics.median(self.ratios(name))

    def show(self, name: str) -> str:
        """Median and range of `ratios`."""
        ratios = self.ratios(name)
        return f"{self.ratio(name):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def measure(benchmark: BenchmarkFixture, case: Way, references: Mapping[str, Way], rounds: int) -> Samples:
    """Warm everything up once, then take `rounds` samples of `case` with `references` in between."""
    for way in (*references.values(), case):
        way()
    taken: dict[str, list[float]] = {name: [] for name in references}

    def take() -> None:
        for name, way in references.items():
            taken[name].append(_seconds(way))

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


def memcpy_ways(tensors: Sequence[torch.Tensor]) -> dict[str, Way]:
    """The two ceilings for `tensors` (contiguous), into memory that torch has allocated, as it has the weights'.

    Memory of other allocators may lie on larger pages. Takes as much memory as `tensors`, filled with their bytes.
    """
    ends = np.cumsum([0, *(tensor.nbytes for tensor in tensors)])
    target = torch.ones(int(ends[-1]), dtype=torch.uint8).numpy()
    pairs = [(target[start:end], bytes_of(tensor)) for start, end, tensor in zip(ends, ends[1:], tensors, strict=False)]
    half = len(target) // 2

    def each() -> None:
        for to, of in pairs:
            np.copyto(to, of)

    def halves() -> None:
        for _ in range(2):
            np.copyto(target[half : 2 * half], target[:half])

    return {MEMCPY_EACH: each, LARGE_MEMCPY: halves}


def cast_way(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Way:
    """The ceiling for `tensors` that are wanted in `dtype`. Takes the memory of the result."""
    target = torch.ones(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    parts = torch.split(target, [tensor.numel() for tensor in tensors])
    pairs = list(zip(parts, tensors, strict=True))

    def cast() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for to, of in pairs:
            to.copy_(of.view(-1))
        torch.set_num_threads(threads)

    return cast


def bytes_of(tensor: torch.Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """A contiguous tensor's memory, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _seconds(way: Way) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start
