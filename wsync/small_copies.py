"""Small copies in host memory as a list of addresses. A view for each of them would cost ten times the copy itself."""

import ctypes
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from wsync.runs import IntArray
from wsync.tiles import Kind, tables
from wsync.traits import addresses
from wsync.views import Pair

SMALL_BYTES = 32 << 10
"""Larger copies are left to torch, which has more threads for them."""

# Unlike that of `ctypes.CDLL` it keeps the interpreter lock: giving it up for each copy takes longer than the copy.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


class SmallCopies:
    """Copies between equal dtypes, in runs that are contiguous on both sides."""

    def __init__(self, rows: IntArray) -> None:
        """Args:
        rows: int64 `[rows, 5]`: source memory, byte offset in it, target memory, byte offset in it, bytes.
        """
        self._sources, self._from, self._targets, self._to = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]
        self._nbytes: list[int] = rows[:, 4].tolist()

    def run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copy. Regions must lie inside of their memories: nothing here looks."""
        if self._nbytes:
            froms = _addresses(sources)[self._sources] + self._from
            tos = _addresses(targets)[self._targets] + self._to
            deque(map(_memmove, tos.tolist(), froms.tolist(), self._nbytes), maxlen=0)


def split_small(pairs: Sequence[Pair]) -> tuple[SmallCopies, Sequence[Pair]]:
    """What can be done as a list of addresses, and the rest."""
    small, large = list[Pair](), list[Pair]()
    for pair in pairs:
        source, target = pair
        fits = source.dtype == target.dtype and source.region.numel * source.dtype.itemsize <= SMALL_BYTES
        (small if fits else large).append(pair)
    found, others = tables(small, frozenset(), alignment=1)
    rows = found.get(Kind(torch.uint8, torch.uint8, False), np.empty((0, 5), np.int64))
    return SmallCopies(rows), [*large, *others]


def _addresses(memories: Sequence[torch.Tensor]) -> IntArray:
    return np.array(addresses(memories), np.int64)
