"""Arrays of contiguous runs: how they overlap, and how to write many of them as a few nested progressions."""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Shape = tuple[tuple[int, ...], tuple[int, ...]]


def overlaps(
    starts: IntArray, length: int, sorted_starts: IntArray, sorted_length: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Where runs meet disjoint runs in ascending order.

    Args:
        starts: first positions of the queried runs `[q]`, in any order; each is `length` long.
        sorted_starts: first positions of the others `[s]`, ascending; each is `sorted_length` long.

    Returns:
        `(index, begin, end)`, one row a meeting, in the order of `starts`: which of the sorted runs, and the
        positions `[begin, end)` that both hold.
    """
    first = np.searchsorted(sorted_starts, starts - sorted_length, side="right")
    stop = np.searchsorted(sorted_starts, starts + length, side="left")
    count = np.maximum(stop - first, 0)
    query = np.repeat(np.arange(len(starts)), count)
    index = np.arange(len(query)) + np.repeat(first - (np.cumsum(count) - count), count)
    begin = np.maximum(starts[query], sorted_starts[index])
    end = np.minimum(starts[query] + length, sorted_starts[index] + sorted_length)
    return index, begin, end


def progressions(starts: IntArray, lengths: IntArray) -> list[tuple[int, Shape]]:
    """Write runs as few `(offset, (sizes, strides))`; read one after the other they give the runs in their order."""
    starts, lengths = _join_touching(starts, lengths)
    unique, keys = np.unique(lengths, return_inverse=True)
    shapes: list[Shape] = [((int(n),), (1,)) if n != 1 else ((), ()) for n in unique]
    while len(starts) > 1:
        begins = _group(starts, keys)
        if len(begins) == len(starts):
            break
        counts = np.diff(begins, append=len(starts))
        steps = np.where(counts > 1, starts[np.minimum(begins + 1, len(starts) - 1)] - starts[begins], 0)
        starts = starts[begins]
        keys, shapes = _nest(keys[begins], shapes, counts, steps)
    return [(start, shapes[key]) for start, key in zip(starts.tolist(), keys.tolist(), strict=True)]


def _join_touching(starts: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Runs that follow each other without a gap become one; empty runs go."""
    filled = lengths > 0
    starts, lengths = starts[filled], lengths[filled]
    if not len(starts):
        return starts, lengths
    first = np.flatnonzero(np.append(True, starts[1:] != starts[:-1] + lengths[:-1]))
    return starts[first], np.add.reduceat(lengths, first)


def _group(starts: IntArray, keys: IntArray) -> IntArray:
    """Cut items into arithmetic progressions of one key, greedily from the left; the first item of each.

    A link joins item i to item i + 1. Links of one step form a series, and neighbouring series share an item, which
    goes to the left one. A series of a single link whose first item is taken has only its last item left and passes
    that on: so single links alternate, and every other series fixes the answer for the next one.
    """
    step = np.diff(starts)
    usable = keys[1:] == keys[:-1]
    breaks = (step[1:] != step[:-1]) | ~usable[1:] | ~usable[:-1]
    first = np.flatnonzero(np.append(True, breaks))
    single = np.diff(first, append=len(step)) == 1
    usable = usable[first]

    series = np.arange(len(first))
    fixed = ~(usable & single)
    last_fixed = np.maximum.accumulate(np.where(fixed, series, -1))
    after = ((fixed & usable)[last_fixed] & (last_fixed >= 0)) ^ ((series - last_fixed) % 2 == 1)
    taken = np.append(False, after[:-1])

    opens = np.where(usable, ~(taken & single), ~taken)
    begins = (first + (taken & usable))[opens]
    return begins if after[-1] else np.append(begins, len(starts) - 1)


def _nest(keys: IntArray, shapes: list[Shape], counts: IntArray, steps: IntArray) -> tuple[IntArray, list[Shape]]:
    """Keys and shapes after each item became `counts` of them, `steps` apart."""
    ids = np.zeros(len(keys), np.int64)
    for column in (keys, counts, steps):
        values, inverse = np.unique(column, return_inverse=True)
        _, ids = np.unique(ids * len(values) + inverse, return_inverse=True)
    _, example = np.unique(ids, return_index=True)
    nested: list[Shape] = []
    rows = zip(keys[example].tolist(), counts[example].tolist(), steps[example].tolist(), strict=True)
    for key, count, step in rows:
        sizes, strides = shapes[key]
        if count > 1 and sizes and step == sizes[0] * strides[0]:
            nested.append(((count * sizes[0], *sizes[1:]), strides))
        else:
            nested.append(((count, *sizes), (step, *strides)) if count > 1 else (sizes, strides))
    return ids, nested
