"""Copies between whole tensors and runs of one buffer, in host memory.

Making a view takes longer than a small copy. Here tensors of one shape, evenly spaced in the buffer, get their views
from one call, and the whole tensors need none.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from wsync.traits import all_contiguous, dtypes, numels, shapes
from wsync.views import Pair, Place, as_dtype


@dataclass(frozen=True, slots=True)
class _Row:
    """Runs of equal shape, evenly spaced."""

    offset: int
    sizes: tuple[int, ...]
    """How many, and the shape of each."""

    strides: tuple[int, ...]

    def cut(self, elements: torch.Tensor) -> Sequence[torch.Tensor]:
        """A view of each."""
        return elements.as_strided(self.sizes, self.strides, int(elements.storage_offset()) + self.offset).unbind(0)


class WholeCopies:
    """Copies between contiguous tensors and runs of one buffer."""

    def __init__(self, pairs: Sequence[Pair], side: int) -> None:
        """Args:
        pairs: on one side contiguous runs of one memory, the buffer, in ascending order and in one dtype; on the
            other what is to be all of another memory.
        side: of the buffer: 0 if it is the source of the copies, 1 if it is the target.
        """
        self.pairs, self._side = tuple(pairs), side
        buffer = pairs[0][side]
        self._memory, self._dtype = buffer.memory, buffer.dtype
        self._wholes = [pair[1 - side].memory for pair in pairs]
        self._numels = [pair[side].region.numel for pair in pairs]
        self._dtypes = [pair[1 - side].dtype for pair in pairs]
        self._rows: Sequence[_Row] = ()
        self._order: Sequence[int] = ()

    def run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
        """Copy. False, and nothing is done, if a tensor is not just what is copied, in a row.

        A tensor must have the shape that it had at the first run.
        """
        buffers, memories = (targets, sources) if self._side else (sources, targets)
        buffer, wholes = buffers[self._memory], list(map(memories.__getitem__, self._wholes))
        if not (
            numels(wholes) == self._numels
            and dtypes(wholes) == self._dtypes
            and all_contiguous(wholes)
            and buffer.is_contiguous()
        ):
            return False
        if not self._rows:
            self._lay_out(shapes(wholes))
        elements = as_dtype(buffer.flatten(), self._dtype)
        runs = [view for row in self._rows for view in row.cut(elements)]
        ordered = list(map(wholes.__getitem__, self._order))
        torch._foreach_copy_(*((runs, ordered) if self._side else (ordered, runs)))
        return True

    def _lay_out(self, found: Sequence[tuple[int, ...]]) -> None:
        """Rows for tensors of these shapes."""
        alike = defaultdict[tuple[int, ...], list[int]](list)
        for number, shape in enumerate(found):
            alike[shape].append(number)
        rows, order = list[_Row](), list[int]()
        for shape, numbers in alike.items():
            rows += _rows(shape, [self.pairs[number][self._side].region.offset for number in numbers])
            order += numbers
        self._rows, self._order = rows, order


def split_whole(pairs: Iterable[Pair]) -> tuple[Sequence[WholeCopies], Sequence[Pair]]:
    """What may be copied so, and the rest."""
    found, rest = list[WholeCopies](), list(pairs)
    for side in (1, 0):
        groups = defaultdict[tuple[object, ...], list[Pair]](list)
        others = list[Pair]()
        for pair in sorted(rest, key=lambda pair: pair[side].region.offset):
            run, whole = pair[side], pair[1 - side]
            fits = _is_run(run) and _is_run(whole) and not whole.region.offset
            (groups[run.memory, run.dtype, whole.dtype] if fits else others).append(pair)
        for group in groups.values():
            if len(group) > 1:
                found.append(WholeCopies(group, side))
            else:
                others += group
        rest = others
    return found, rest


def _is_run(place: Place) -> bool:
    return place.region.run_length == place.region.numel > 0


def _rows(shape: tuple[int, ...], offsets: Sequence[int]) -> list[_Row]:
    """Ascending offsets as few evenly spaced rows."""
    rows = list[_Row]()
    inner = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    begin = 0
    while begin < len(offsets):
        end = begin + 1
        step = offsets[end] - offsets[begin] if end < len(offsets) else 0
        while end < len(offsets) and offsets[end] - offsets[end - 1] == step:
            end += 1
        rows.append(_Row(offsets[begin], (end - begin, *shape), (step, *inner)))
        begin = end
    return rows
