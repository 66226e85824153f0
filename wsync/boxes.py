"""Nested strided runs as boxes of digits, so that two of them meet without listing their runs.

Take the strides of both sides, and let each divide the next: 1, 128, 4096 say. They are the places of a mixed-radix
notation of positions, and a run that never carries from one place into the next is a box: an interval of digits at
each place. Two boxes meet in a box. Shards, slices and experts of one tensor are all of this kind.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple


class Box(NamedTuple):
    """Digits `lows[k] .. lows[k] + counts[k]` at each place k, the lowest place first."""

    lows: tuple[int, ...]
    counts: tuple[int, ...]

    def meet(self, other: "Box") -> "Box | None":
        """The box of digits in both, or None."""
        lows = tuple(map(max, self.lows, other.lows))
        counts = tuple(
            min(a + m, b + n) - low
            for a, m, b, n, low in zip(self.lows, self.counts, other.lows, other.counts, lows, strict=True)
        )
        return Box(lows, counts) if min(counts) > 0 else None


def places(strides: Iterable[int]) -> tuple[int, ...] | None:
    """Place values, ascending from 1, in which all `strides` are places; None if they do not divide in turn."""
    chain = sorted({1, *strides})
    if chain[0] < 1 or any(wide % narrow for narrow, wide in pairwise(chain)):
        return None
    return tuple(chain)


def split(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], chain: tuple[int, ...]) -> list[Box] | None:
    """Boxes that together are a coalesced monotone run, in its order; None if an inner dim would carry.

    Only the outermost dim is cut, into a partial row, whole rows and a rest at each place. `chain` has all `strides`.
    """
    counts = [1] * len(chain)
    for size, stride in zip(sizes, strides, strict=True):
        counts[chain.index(stride)] = size
    top = chain.index(strides[0]) if strides else 0
    digits = _digits(offset, chain)
    for level in range(top):
        radix = chain[level + 1] // chain[level]
        if digits[level] + counts[level] > radix:
            rows, rest = divmod(counts[level], radix)
            if digits[level] or rest:
                return None
            # Monotone: a dim that steps over these rows one by one would have met them, so the place is free.
            counts[level], counts[level + 1] = radix, rows
    return _cut(offset, counts, top, chain)


def _cut(offset: int, counts: list[int], level: int, chain: tuple[int, ...]) -> list[Box]:
    """Cut the outermost dim, at `level`, wherever it carries."""
    digits = _digits(offset, chain)
    if level == len(chain) - 1 or digits[level] + counts[level] <= chain[level + 1] // chain[level]:
        return [Box(digits, tuple(counts))]
    radix = chain[level + 1] // chain[level]
    left = counts[level]
    found = []
    if digits[level]:
        head = radix - digits[level]
        found.append(Box(digits, (*counts[:level], head, *counts[level + 1 :])))
        offset += head * chain[level]
        left -= head
    rows, tail = divmod(left, radix)
    if rows:
        found += _cut(offset, [*counts[:level], radix, rows, *counts[level + 2 :]], level + 1, chain)
        offset += rows * chain[level + 1]
    if tail:
        found.append(Box(_digits(offset, chain), (*counts[:level], tail, *counts[level + 1 :])))
    return found


def _digits(position: int, chain: tuple[int, ...]) -> tuple[int, ...]:
    """Digits of `position`, the lowest place first; the highest one has no bound."""
    inner = tuple(position // place % (wide // place) for place, wide in pairwise(chain))
    return (*inner, position // chain[-1])
