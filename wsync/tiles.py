"""Strided copies cut into tiles, the rows of a kernel's table. Integer arithmetic only: no GPU is needed for it."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from wsync.runs import IntArray
from wsync.views import Pair, first_elements, outer_dims

TILE = 8192
"""Most elements in one row. Of 1024 to 16384 this was the best on an H200, by a few percent."""

MIN_RUN_BYTES = 256
"""Copies in shorter runs are left to torch: a row for each run would cost more than it moves."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells one launch from another."""

    source: torch.dtype
    target: torch.dtype
    """Equal dtypes are copied as words of the widest integer that fits."""

    aligned: bool
    """Every row begins at a multiple of 16 bytes on both sides."""


Table = IntArray
"""int64 `[rows, 5]`: source memory, byte offset in it, target memory, byte offset in it, number of elements."""


def tables(
    pairs: Sequence[Pair], casts: frozenset[tuple[torch.dtype, torch.dtype]], alignment: int
) -> tuple[Mapping[Kind, Table], Sequence[Pair]]:
    """Rows by kind for all copies that a kernel can do, and the other ones.

    Args:
        pairs: the copies.
        casts: pairs of different dtypes that the kernel converts.
        alignment: what divides the address of every memory, in bytes: 1, 2, 4, 8 or 16.
    """
    rows = defaultdict[Kind, list[Table]](list)
    others = []
    for pair in pairs:
        source, target = pair
        equal = source.dtype == target.dtype
        if not source.region.numel:
            continue
        if not equal and (source.dtype, target.dtype) not in casts:
            others.append(pair)
            continue
        runs = _runs(pair)
        if runs is None:
            others.append(pair)
            continue
        kind, table = _cut(*runs, pair, alignment)
        rows[kind].append(table)
    return {kind: np.concatenate(parts) for kind, parts in rows.items()}, others


def _runs(pair: Pair) -> tuple[tuple[IntArray, IntArray], int] | None:
    """First elements of the runs that are contiguous on both sides, and their length; None if that is too short."""
    dims, length = outer_dims(pair)
    if length * pair[1].dtype.itemsize < MIN_RUN_BYTES and dims:
        return None
    return first_elements(pair, dims), length


def _cut(runs: tuple[IntArray, IntArray], length: int, pair: Pair, alignment: int) -> tuple[Kind, Table]:
    """Rows of at most `TILE` elements, and the kind of launch that they need."""
    source, target = pair
    froms, tos = runs[0] * source.dtype.itemsize, runs[1] * target.dtype.itemsize
    steps = (source.dtype.itemsize, target.dtype.itemsize)
    source_type, target_type = source.dtype, target.dtype
    granularity = math.gcd(alignment, _granularity(froms, tos))
    if source.dtype == target.dtype:
        nbytes = length * target.dtype.itemsize
        word = math.gcd(granularity, nbytes, 8)
        source_type = target_type = _WORDS[word]
        steps, length = (word, word), nbytes // word
    starts = np.arange(0, length, TILE, dtype=np.int64)
    table = np.empty((len(froms), len(starts), 5), np.int64)
    table[..., 0], table[..., 2] = source.memory, target.memory
    table[..., 1] = froms[:, None] + starts * steps[0]
    table[..., 3] = tos[:, None] + starts * steps[1]
    table[..., 4] = np.minimum(TILE, length - starts)
    return Kind(source_type, target_type, granularity % 16 == 0), table.reshape(-1, 5)


def _granularity(froms: IntArray, tos: IntArray) -> int:
    """The largest power of two, at most 16, that divides every offset."""
    return math.gcd(16, int(np.bitwise_or.reduce(froms) | np.bitwise_or.reduce(tos)))
