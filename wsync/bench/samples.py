"""Taking samples on a machine that is not quiet: a case and its references in turn, so that noise hits all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Way = Callable[[], object]


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


def seconds_of(way: Way) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    way()
    return time.perf_counter() - start
