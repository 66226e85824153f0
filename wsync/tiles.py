"""Strided copies cut into tiles, the rows of a kernel's table. Integer arithmetic only: no GPU is needed for it."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from wsync.runs import IntArray
from wsync.views import Dim, Pair, first_elements, outer_dims

TILE = 8192
"""Most elements in one row. Of 1024 to 16384 this was the best on an H200, by a few percent."""

MIN_BLOCK = 64
"""Copies that fall into smaller blocks, in elements, are left to torch: a row for each costs more than it moves."""

_LONG = 4 * TILE
"""Runs of so many elements are cut one by one: nothing is gained by filling a tile from two of them."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Kind:
    """What tells one launch from another."""

    source: torch.dtype
    target: torch.dtype
    """Equal dtypes are copied as words of the widest integer that fits."""

    aligned: bool
    """Everything begins at a multiple of 16 bytes on both sides, runs of a block too."""

    in_blocks: bool
    """Whether a row is a part of a block, or else of a run."""


Table = IntArray
"""int64 `[rows, 5]`: source memory, byte offset in it, target memory, byte offset in it, number of elements.

In blocks int64 `[rows, 9]`: the offsets are those of the whole block, and there follow the first element of the row in
the block, and the block's elements in a run, between the beginnings of runs at the source, and at the target.
"""


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
        if not source.region.numel:
            continue
        dims, length = outer_dims(pair)
        converts = source.dtype == target.dtype or (source.dtype, target.dtype) in casts
        block = dims[-1][0] * length if dims else length
        if not converts or (dims and block < MIN_BLOCK):
            others.append(pair)
            continue
        if not dims or length >= _LONG:
            kind, table = _runs(pair, dims, length, alignment)
        else:
            kind, table = _blocks(pair, dims, length, alignment)
        rows[kind].append(table)
    return {kind: np.concatenate(parts) for kind, parts in rows.items()}, others


def _runs(pair: Pair, dims: Sequence[Dim], length: int, alignment: int) -> tuple[Kind, Table]:
    """Rows of at most `TILE` elements, each of one run, and the kind of launch that they need."""
    froms, tos = _offsets(pair, dims)
    granularity = math.gcd(alignment, _granularity(froms, tos))
    words = _Words.of(pair, granularity, length)
    starts = np.arange(0, words.count, TILE, dtype=np.int64)
    table = np.empty((len(froms), len(starts), 5), np.int64)
    table[..., 0], table[..., 2] = pair[0].memory, pair[1].memory
    table[..., 1] = froms[:, None] + starts * words.source.itemsize
    table[..., 3] = tos[:, None] + starts * words.target.itemsize
    table[..., 4] = np.minimum(TILE, words.count - starts)
    return Kind(words.source, words.target, granularity % 16 == 0, False), table.reshape(-1, 5)


def _blocks(pair: Pair, dims: Sequence[Dim], length: int, alignment: int) -> tuple[Kind, Table]:
    """Rows of at most `TILE` elements of a block: runs at equal distances, as of the innermost dim."""
    *outer, (size, *steps) = dims
    froms, tos = _offsets(pair, outer)
    step_bytes = [step * place.dtype.itemsize for step, place in zip(steps, pair, strict=True)]
    run_bytes = [length * place.dtype.itemsize for place in pair]
    granularity = math.gcd(alignment, _granularity(froms, tos), *step_bytes, *run_bytes)
    words = _Words.of(pair, granularity, length)
    starts = np.arange(0, size * words.count, TILE, dtype=np.int64)
    table = np.empty((len(froms), len(starts), 9), np.int64)
    table[..., 0], table[..., 2] = pair[0].memory, pair[1].memory
    table[..., 1], table[..., 3] = froms[:, None], tos[:, None]
    table[..., 4] = np.minimum(TILE, size * words.count - starts)
    table[..., 5], table[..., 6] = starts, words.count
    table[..., 7], table[..., 8] = step_bytes[0] // words.source.itemsize, step_bytes[1] // words.target.itemsize
    return Kind(words.source, words.target, granularity % 16 == 0, True), table.reshape(-1, 9)


@dataclass(frozen=True, slots=True)
class _Words:
    """What the elements of a run are copied as."""

    source: torch.dtype
    target: torch.dtype
    count: int
    """In a run."""

    @classmethod
    def of(cls, pair: Pair, granularity: int, length: int) -> "_Words":
        """For runs of `length` elements whose beginnings `granularity` divides, in bytes."""
        source, target = pair[0].dtype, pair[1].dtype
        if source != target:
            return cls(source, target, length)
        word = math.gcd(granularity, length * target.itemsize, 8)
        return cls(_WORDS[word], _WORDS[word], length * target.itemsize // word)


def _offsets(pair: Pair, dims: Sequence[Dim]) -> tuple[IntArray, IntArray]:
    """Bytes from the beginning of each memory to the first element of each run, or block, over `dims`."""
    froms, tos = first_elements(pair, dims)
    return froms * pair[0].dtype.itemsize, tos * pair[1].dtype.itemsize


def _granularity(froms: IntArray, tos: IntArray) -> int:
    """The largest power of two, at most 16, that divides every offset."""
    return math.gcd(16, int(np.bitwise_or.reduce(froms) | np.bitwise_or.reduce(tos)))
