"""Views of memory as regions, two at a time.

`wsync.regions` is the algebra of sets of positions. A copy needs more: which position goes to which. Here a pair of
regions of equal sizes means "element i of the one is element i of the other", in the same enumeration.
"""

import math
from collections.abc import Sequence

import torch

from wsync.regions import Region


def pair(
    sizes: Sequence[int], first: tuple[int, Sequence[int]], second: tuple[int, Sequence[int]]
) -> tuple[Region, Region] | None:
    """Two views of the same `sizes`, each (offset, strides), as paired regions; the first one is monotone.

    None if the first view reads an element twice (an expanded tensor), or if its dims interleave so that no order of
    them is monotone.
    """
    rows = sorted(
        ((stride, size, other) for size, stride, other in zip(sizes, first[1], second[1], strict=True) if size != 1),
        reverse=True,
    )
    kept: list[tuple[int, int, int]] = []
    for stride, size, other in rows:
        if kept and kept[-1][1] == stride * size and kept[-1][2] == other * size:
            size *= kept.pop()[0]
        kept.append((size, stride, other))
    shape = tuple(size for size, _, _ in kept)
    one = Region(first[0], shape, tuple(stride for _, stride, _ in kept))
    return (one, Region(second[0], shape, tuple(other for _, _, other in kept))) if one.is_monotone else None


def positions(offset: int, sizes: Sequence[int], strides: Sequence[int]) -> Region:
    """The positions of a view as a set, in ascending order; an expanded dim counts once.

    Raises `ValueError` if the dims interleave so that no order of them is monotone.
    """
    shown = [min(size, 1) if stride == 0 else size for size, stride in zip(sizes, strides, strict=True)]
    regions = pair(shown, (offset, strides), (offset, strides))
    if regions is None:
        raise ValueError(f"a view of sizes {list(sizes)} and strides {list(strides)} overlaps itself")
    return regions[0]


def ascending(region: Region) -> Region:
    """The same set of positions, enumerated in ascending order."""
    return region if region.is_monotone else positions(region.offset, region.sizes, region.strides)


def storage_of(tensor: torch.Tensor) -> int:
    """What tensors that share memory share. Given to another storage when the last of them is gone."""
    return int(tensor.untyped_storage()._cdata)


def offset_of(tensor: torch.Tensor) -> int:
    """Position of the first element in the tensor's storage."""
    return int(tensor.storage_offset())


def lacking_bytes(tensor: torch.Tensor) -> int:
    """How many bytes the storage of `tensor` is too short: it was freed, say, under a tensor that kept its shape."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (offset_of(tensor) + last + 1) * tensor.itemsize
    return max(0, needed - tensor.untyped_storage().nbytes())


def memory_view(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """A region of `tensor`'s memory, counted from its first element. No copy."""
    return tensor.as_strided(region.sizes, region.strides, offset_of(tensor) + region.offset)


def cut(one: Region, other: Region, low: int, high: int) -> list[tuple[Region, Region]]:
    """The part of a pair whose positions in `one` (monotone) lie in `[low, high)`, as pairs of equal sizes."""
    begin, end = _rank(one, low), _rank(one, high)
    return list(zip(_slices(one, begin, end), _slices(other, begin, end), strict=True))


def _rank(region: Region, limit: int) -> int:
    """Number of elements of a monotone region whose position is below `limit`."""
    count, offset, inner = 0, region.offset, region.numel
    for size, stride in zip(region.sizes, region.strides, strict=True):
        if offset >= limit or not inner:
            return count
        inner //= size
        begun = min(-(-(limit - offset) // stride), size)
        count, offset = count + (begun - 1) * inner, offset + (begun - 1) * stride
    return count + (offset < limit)


def _slices(region: Region, begin: int, end: int) -> list[Region]:
    """Elements `[begin, end)` of the enumeration as regions to be read one after the other.

    How they are cut depends on `region.sizes` alone, so that both regions of a pair are cut alike.
    """
    if begin >= end:
        return []
    if not region.sizes:
        return [region]
    inner, stride = math.prod(region.sizes[1:]), region.strides[0]
    rest = (region.sizes[1:], region.strides[1:])
    first, last = -(-begin // inner), end // inner
    if first > last:
        return _slices(Region(region.offset + last * stride, *rest), begin - last * inner, end - last * inner)
    parts = _slices(Region(region.offset + (first - 1) * stride, *rest), begin - (first - 1) * inner, inner)
    if begin == first * inner:
        parts = []
    if last > first:
        parts.append(Region(region.offset + first * stride, (last - first, *rest[0]), region.strides))
    return parts + _slices(Region(region.offset + last * stride, *rest), 0, end - last * inner)
