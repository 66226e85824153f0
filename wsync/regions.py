"""Parts of a flattened tensor, and their algebra.

Everything that wsync moves is a part of some full tensor: an FSDP shard, a TP slice, one expert of a stack, the q
rows of a fused qkv. Flatten the full tensor and each of them is a *nested strided run*: an offset, and sizes with
strides, outermost first. Positions are in elements. This file is arithmetic on integers: no tensor is moved.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul, sub

import numpy as np
import torch

from wsync.boxes import Box, places, split
from wsync.runs import IntArray, overlaps, progressions

_MANY_RUNS = 1 << 20


@dataclass(frozen=True, slots=True)
class Region:
    """Elements `offset + sum(i_k * strides[k])` for all `0 <= i_k < sizes[k]`, enumerated with the last index fastest.

    A region is *monotone* when that enumeration never goes back or repeats; shards, slices and experts all are.
    The set operations need monotone regions and raise `ValueError` otherwise. An element's *ordinal* is its place
    in the enumeration, from 0.

    Operations that return several regions return disjoint ones that, read one after the other, keep the order.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.strides) or any(size < 0 for size in self.sizes):
            raise ValueError(f"not a region: sizes {self.sizes} with strides {self.strides}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Region":
        """All of a row-major tensor of `shape`."""
        return cls.box(shape, [0] * len(shape), shape)

    @classmethod
    def box(cls, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> "Region":
        """Indices `offsets[k] .. offsets[k] + sizes[k]` of each dim of a row-major tensor of `shape`.

        Raises `ValueError` if that reaches outside of `shape`.
        """
        if not len(shape) == len(offsets) == len(sizes) or any(
            first < 0 or count < 0 or first + count > size
            for size, first, count in zip(shape, offsets, sizes, strict=True)
        ):
            raise ValueError(f"box of sizes {tuple(sizes)} at {tuple(offsets)} is not inside shape {tuple(shape)}")
        strides = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()
        return cls(sum(map(mul, offsets, strides)), tuple(sizes), strides)

    @classmethod
    def span(cls, start: int, count: int) -> "Region":
        """The contiguous elements `start .. start + count`."""
        return cls(start, (count,), (1,))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def bounds(self) -> tuple[int, int]:
        """Lowest position, and one more than the highest; `(0, 0)` if empty."""
        if not self.numel:
            return 0, 0
        reach = [(size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)]
        return self.offset + sum(r for r in reach if r < 0), self.offset + sum(r for r in reach if r > 0) + 1

    @property
    def is_monotone(self) -> bool:
        """True if positions strictly grow along the enumeration."""
        reach = 0
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size > 1:
                if stride <= reach:
                    return self.numel == 0
                reach += (size - 1) * stride
        return True

    @property
    def run_length(self) -> int:
        """Length of each of the runs that `runs` lists; 0 if empty."""
        flat = self.coalesce()
        if not flat.numel:
            return 0
        return flat.sizes[-1] if flat.sizes and flat.strides[-1] == 1 else 1

    def coalesce(self) -> "Region":
        """The same enumeration in its shortest form: dims of size 1 dropped, dims that continue each other merged.

        Every empty region becomes `Region(0, (0,), (1,))`.
        """
        if 0 in self.sizes:
            return _EMPTY
        sizes: list[int] = []
        strides: list[int] = []
        for size, stride in zip(self.sizes, self.strides, strict=True):
            if size == 1:
                continue
            if sizes and strides[-1] == size * stride:
                sizes[-1] *= size
                strides[-1] = stride
            else:
                sizes.append(size)
                strides.append(stride)
        return Region(self.offset, tuple(sizes), tuple(strides))

    def runs(self) -> tuple[IntArray, int]:
        """First positions of the contiguous runs, in enumeration order (int64 `[runs]`), and the length of each."""
        flat, length = self.coalesce(), self.run_length
        outer = len(flat.sizes) - (length > 1)
        starts = np.full(1 if length else 0, flat.offset, np.int64)
        for size, stride in zip(flat.sizes[:outer], flat.strides[:outer], strict=True):
            starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return starts, length

    def intersect(self, other: "Region") -> tuple["Region", ...]:
        """What both hold, in ascending order."""
        a, b = self._sorted(), other._sorted()
        found = _box_overlaps(a, b)
        if found is None:
            starts, length = b.runs()
            _, begin, end = overlaps(*a.runs(), starts, length)
            return compress(begin, end - begin)
        return _join(position for position, _ in found)

    def locate(self, part: "Region") -> tuple["Region", ...]:
        """Ordinals in this region of the elements of `part`, in the order of `part`, which need not be monotone.

        Raises `ValueError` if `part` is not inside.
        """
        whole, part = self._sorted(), part.coalesce()
        found = _box_overlaps(part, whole) if part.is_monotone else None
        if found is None:
            starts, length = whole.runs()
            index, begin, end = overlaps(*part.runs(), starts, length)
            ordinals = compress(index * length + begin - starts[index], end - begin)
        else:
            ordinals = _join(ordinal for _, ordinal in found)
        if sum(region.numel for region in ordinals) != part.numel:
            raise ValueError(f"{part} is not inside {self}")
        return ordinals

    def select(self, ordinals: "Region") -> tuple["Region", ...]:
        """Positions of the elements with these ordinals, in their order. The inverse of `locate`, for any region.

        Raises `ValueError` if an ordinal is not in `0 .. numel`.
        """
        low, high = ordinals.bounds
        if low < 0 or high > self.numel:
            raise ValueError(f"ordinals {low} to {high - 1} asked of {self}, which has {self.numel} elements")
        flat, ordinals = self.coalesce(), ordinals.coalesce()
        found = _box_select(flat, ordinals)
        if found is not None:
            return _join(found)
        starts, length = flat.runs()
        wanted, count = ordinals.runs()
        rows = np.arange(len(starts), dtype=np.int64) * length
        index, begin, end = overlaps(wanted, count, rows, length)
        return compress(starts[index] + begin - rows[index], end - begin)

    def translate(self, by: int) -> "Region":
        """The same elements, `by` positions further on."""
        return Region(self.offset + by, self.sizes, self.strides)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """These elements of `flat` (1-D, contiguous), as a view of shape `sizes`. Strides must not be negative.

        Raises `ValueError` if they are not all in `flat`.
        """
        low, high = self.bounds
        if low < 0 or high > flat.numel():
            raise ValueError(f"{self} reaches outside of a tensor of {flat.numel()} elements")
        offset = self.offset if self.numel else 0
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + offset)

    def _sorted(self) -> "Region":
        flat = self.coalesce()
        if not flat.is_monotone:
            raise ValueError(f"{self} is not monotone: it visits positions out of order or twice")
        return flat


_EMPTY = Region(0, (0,), (1,))


def compress(starts: IntArray, lengths: IntArray) -> tuple[Region, ...]:
    """Runs (both int64 `[runs]`) as few nested regions, which read one after the other give the runs in their order."""
    return tuple(Region(offset, *shape) for offset, shape in progressions(starts, lengths))


def uncovered(parts: Iterable[Region], numel: int) -> tuple[Region, ...]:
    """What of the positions `0 .. numel` no part holds. Parts may overlap, and need not be monotone.

    Raises `ValueError` if a part reaches outside.
    """
    distinct = {part.coalesce() for part in parts} - {_EMPTY}
    for part in distinct:
        low, high = part.bounds
        if low < 0 or high > numel:
            raise ValueError(f"{part} reaches outside of a tensor of {numel} elements")
    if not numel or Region.span(0, numel).coalesce() in distinct:
        return ()
    if all(part.numel == part.run_length for part in distinct):
        return _between(sorted((part.offset, part.numel) for part in distinct), numel)
    if sum(part.numel // part.run_length for part in distinct) > _MANY_RUNS:
        return _uncovered_by_mask(distinct, numel)
    pieces = [(starts, np.full(len(starts), length)) for starts, length in (part.runs() for part in distinct)]
    starts = np.concatenate([np.array([-1, numel]), *(starts for starts, _ in pieces)])
    ends = starts + np.concatenate([np.array([1, 1]), *(lengths for _, lengths in pieces)])
    order = np.argsort(starts, kind="stable")
    reached = np.maximum.accumulate(ends[order])[:-1]
    gaps = starts[order][1:] - reached
    return compress(reached[gaps > 0], gaps[gaps > 0])


def _between(spans: Iterable[tuple[int, int]], numel: int) -> tuple[Region, ...]:
    """`uncovered` for `(start, count)` in ascending order. Models have thousands of tensors of a few spans each."""
    gaps, reached = [], 0
    for start, count in (*spans, (numel, 0)):
        if start > reached:
            gaps.append(Region.span(reached, start - reached).coalesce())
        reached = max(reached, start + count)
    return tuple(gaps)


def _uncovered_by_mask(parts: Iterable[Region], numel: int) -> tuple[Region, ...]:
    """`uncovered` for so many runs that sorting them costs more than one byte an element."""
    free = torch.ones(numel + 2, dtype=torch.bool)
    free[0] = free[-1] = False
    for part in parts:
        low, _ = part.bounds
        Region(low, part.sizes, tuple(map(abs, part.strides))).view(free[1:]).fill_(False)
    edges = np.flatnonzero(np.diff(free.numpy().view(np.int8)))
    return compress(edges[::2], edges[1::2] - edges[::2])


def _box_overlaps(part: Region, whole: Region) -> list[tuple[Region, Region]] | None:
    """Where coalesced monotone regions meet: positions, and ordinals in `whole`. None if they are not boxes."""
    if not part.numel or not whole.numel:
        return []
    chain = places(part.strides + whole.strides)
    if chain is None:
        return None
    ours = split(part.offset, part.sizes, part.strides, chain)
    theirs = split(whole.offset, whole.sizes, whole.strides, chain)
    if ours is None or theirs is None:
        return None
    found = []
    for mine in ours:
        base = 0
        for box in theirs:
            both = mine.meet(box)
            if both:
                inner = tuple(accumulate(box.counts, mul, initial=1))
                ordinal = base + sum(map(mul, map(sub, both.lows, box.lows), inner))
                position = sum(map(mul, both.lows, chain))
                found.append((_from_digits(position, both, chain), _from_digits(ordinal, both, inner[:-1])))
            base += math.prod(box.counts)
    return found


def _box_select(region: Region, ordinals: Region) -> list[Region] | None:
    """Positions of `ordinals` in a coalesced region, or None if they are not boxes of its rows."""
    if not ordinals.numel:
        return []
    rows = tuple(accumulate(reversed(region.sizes), mul, initial=1))[:-1]
    chain = places((*rows, *ordinals.strides)) if ordinals.is_monotone else None
    boxes = split(ordinals.offset, ordinals.sizes, ordinals.strides, chain) if chain else None
    if chain is None or boxes is None:
        return None
    steps = []
    for place in chain:
        level = bisect_right(rows, place) - 1
        steps.append(region.strides[-1 - level] * (place // rows[level]) if rows else 0)
    return [_from_digits(region.offset + sum(map(mul, box.lows, steps)), box, steps) for box in boxes]


def _from_digits(offset: int, box: Box, steps: Sequence[int]) -> Region:
    """The region that starts at `offset` and goes `steps[k]` for each digit of place k."""
    return Region(offset, box.counts[::-1], tuple(steps)[::-1]).coalesce()


def _join(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Coalesced regions with each one that continues the one before it taken into it."""
    joined: list[Region] = []
    for region in regions:
        merged = _continue(joined[-1], region) if joined else None
        if merged:
            joined[-1] = merged
        else:
            joined.append(region)
    return tuple(joined)


def _continue(a: Region, b: Region) -> Region | None:
    """One region that enumerates `a` and then `b`, if `b` goes on with the rows of `a`. Either may be a single row."""
    rows_a = tuple(zip(a.sizes, a.strides, strict=True))
    rows_b = tuple(zip(b.sizes, b.strides, strict=True))
    if rows_a and rows_b and rows_a[1:] == rows_b[1:] and rows_a[0][1] == rows_b[0][1]:
        stride, before, after = rows_a[0][1], rows_a[0][0], rows_b[0][0]
    elif rows_b and rows_a == rows_b[1:]:
        stride, before, after = rows_b[0][1], 1, rows_b[0][0]
    elif rows_a and rows_a[1:] == rows_b:
        stride, before, after = rows_a[0][1], rows_a[0][0], 1
    else:
        return None
    if b.offset != a.offset + before * stride:
        return None
    longer = a if len(rows_a) >= len(rows_b) else b
    return Region(a.offset, (before + after, *longer.sizes[1:]), longer.strides).coalesce()
