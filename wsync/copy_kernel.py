"""Tables of copies on a GPU, one launch for each kind, with the cast inside. Needs Triton, as CUDA builds of torch do.

Rows name memories, not addresses: when a tensor has moved, the list of addresses is sent anew and the tables stay.
Lists are kept, as a bucket lies in another slot of the same ring at every sync. All of it is sent out of pinned memory
on the stream of the launch: the host must not wait for what is queued there, which may be waiting for another rank.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from wsync.copies import UNKNOWN, Keys, copy_views
from wsync.runs import IntArray
from wsync.tiles import TILE, Kind, tables
from wsync.traits import addresses
from wsync.views import Pair

_WARPS, _CASTING_WARPS = 16, 8
"""As measured on an H200: 1.02 device copies with 16 warps, 1.04 with 8."""

_ALIGNMENT_BYTES = 16

_LINK_SHARE = 3
"""Of the multiprocessors, those that copy over a link. A program may have all registers of its own (128 for each of 512
threads), so that nothing runs beside it there. 44 of an H200's 132 have 2.9 MB under way."""

_MOST_LISTS = 16
"""Of addresses, kept for each list of copies: more than a ring has slots."""

_TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.int16: tl.int16,
    torch.uint8: tl.uint8,
}

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

CASTS = frozenset((source, target) for source in _FLOATS for target in _FLOATS if source != target)
"""What the kernel converts: to the nearest, ties to even, as torch does."""


class Launches:
    """The copies of one list on one device."""

    def __init__(self, pairs: Sequence[Pair], device: torch.device, *, sparing: bool = False) -> None:
        """Args:
        pairs: what is copied.
        device: that does it.
        sparing: take a part of the multiprocessors, and leave the others to what runs beside. Enough for copies that
            wait for a link between devices.
        """
        self._pairs, self._device = pairs, device
        self._most: int | None = None
        if sparing:
            self._most = torch.cuda.get_device_properties(device).multi_processor_count // _LINK_SHARE
        self._others: Sequence[Pair] = ()
        self._tables: Mapping[Kind, torch.Tensor] = {}
        self._known: dict[tuple[int, ...], Sequence[torch.Tensor]] = {}
        self._keys = UNKNOWN
        self._lists: Sequence[torch.Tensor] = ()
        self._alignment = 0
        self._stream = -1  # on which all of this was sent

    def again(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], keys: Keys) -> bool:
        """`run`, if all tensors lie where they lay before. False, and nothing is done, if not."""
        if self._current_stream() != self._stream:
            return False
        if not _same(keys, self._keys):
            known = self._known.get(tuple(addresses([*sources, *targets])))
            if known is None:
                return False
            self._lists, self._keys = known, keys
        self._launch(sources, targets)
        return True

    def run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], keys: Keys) -> None:
        """Launch on the current stream. Tensors must be on the device of this object."""
        self._move(tuple(addresses([*sources, *targets])), len(sources))
        self._keys = keys
        self._launch(sources, targets)

    def _launch(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        with torch.cuda.device(self._device):
            for kind, table in self._tables.items():
                _launch(kind, table, self._lists, self._most)
        if self._others:
            copy_views(self._others, sources, targets)

    def _move(self, found: tuple[int, ...], num_sources: int) -> None:
        """Send the addresses to the device, and tables of other words if the memories are less aligned than before."""
        alignment, stream = math.gcd(_ALIGNMENT_BYTES, *found), self._current_stream()
        if stream != self._stream:
            self._known.clear()
            self._alignment, self._stream = 0, stream
        if self._alignment == 0 or alignment < self._alignment:
            rows, self._others = tables(self._pairs, CASTS, alignment)
            # The device begins with the longest, and the host has the others ready before it is done.
            longest_first = sorted(rows.items(), key=lambda item: -len(item[1]))
            self._tables = {kind: _sent(table, self._device) for kind, table in longest_first}
            self._alignment = alignment
        both = _sent(np.array(found, np.int64), self._device)
        if len(self._known) == _MOST_LISTS:
            del self._known[next(iter(self._known))]
        self._lists = self._known[found] = both[:num_sources], both[num_sources:]

    def _current_stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)


def _sent(array: IntArray, device: torch.device) -> torch.Tensor:
    """A copy on `device`, for its current stream."""
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def _same(keys: Keys, last: Keys) -> bool:
    return all(key is not None and key is known for key, known in zip(keys, last, strict=True))


def _launch(kind: Kind, table: torch.Tensor, lists: Sequence[torch.Tensor], most: int | None) -> None:
    programs = len(table) if most is None else min(most, len(table))
    constants = constants_of(kind, several=programs < len(table))
    _copy_rows[(programs,)](table, len(table), *lists, **constants, num_warps=warps_of(kind))


def constants_of(kind: Kind, *, several: bool) -> Mapping[str, Any]:
    """What the kernel is compiled with for `kind`. `several`: a program takes more than one row."""
    unit_bytes = _ALIGNMENT_BYTES if kind.aligned else 1
    units = [max(1, unit_bytes // dtype.itemsize) for dtype in (kind.source, kind.target)]
    return {
        "source_type": _TYPES[kind.source],
        "target_type": _TYPES[kind.target],
        "aligned": kind.aligned,
        "tile": TILE,
        "in_blocks": kind.in_blocks,
        "together": max(units),
        "source_unit": units[0],
        "target_unit": units[1],
        "several": several,
    }


def warps_of(kind: Kind) -> int:
    """How many run one program of `kind`."""
    return _WARPS if kind.source == kind.target else _CASTING_WARPS


@triton.jit  # type: ignore[untyped-decorator]
def _copy_rows(  # type: ignore[no-untyped-def]
    table,
    num_rows,
    sources,
    targets,
    source_type: tl.constexpr,
    target_type: tl.constexpr,
    aligned: tl.constexpr,
    tile: tl.constexpr,
    in_blocks: tl.constexpr,
    together: tl.constexpr,  # elements that no end of a run comes between: they move at once
    source_unit: tl.constexpr,  # elements of which every distance in a block is a multiple
    target_unit: tl.constexpr,
    several: tl.constexpr,  # whether a program takes more than one row
):
    number = tl.program_id(0).to(tl.int64)
    if several:
        for each in range(number, num_rows, tl.num_programs(0)):
            if in_blocks:
                _copy_in_block(
                    table + each * 9, sources, targets, source_type, target_type, aligned, tile,
                    together, source_unit, target_unit,
                )  # fmt: skip
            else:
                _copy_in_run(table + each * 5, sources, targets, source_type, target_type, aligned, tile)
    elif in_blocks:
        _copy_in_block(
            table + number * 9, sources, targets, source_type, target_type, aligned, tile,
            together, source_unit, target_unit,
        )  # fmt: skip
    else:
        _copy_in_run(table + number * 5, sources, targets, source_type, target_type, aligned, tile)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_in_run(  # type: ignore[no-untyped-def]
    row,
    sources,
    targets,
    source_type: tl.constexpr,
    target_type: tl.constexpr,
    aligned: tl.constexpr,
    tile: tl.constexpr,
):
    source = (tl.load(sources + tl.load(row)) + tl.load(row + 1)).to(tl.pointer_type(source_type))
    target = (tl.load(targets + tl.load(row + 2)) + tl.load(row + 3)).to(tl.pointer_type(target_type))
    if aligned:  # lets the compiler load 16 bytes at a time
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
    count = tl.load(row + 4)
    at = tl.arange(0, tile)
    if count == tile:
        tl.store(target + at, tl.load(source + at).to(target_type))
    else:
        tl.store(target + at, tl.load(source + at, mask=at < count).to(target_type), mask=at < count)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_in_block(  # type: ignore[no-untyped-def]
    row,
    sources,
    targets,
    source_type: tl.constexpr,
    target_type: tl.constexpr,
    aligned: tl.constexpr,
    tile: tl.constexpr,
    together: tl.constexpr,
    source_unit: tl.constexpr,
    target_unit: tl.constexpr,
):
    source = (tl.load(sources + tl.load(row)) + tl.load(row + 1)).to(tl.pointer_type(source_type))
    target = (tl.load(targets + tl.load(row + 2)) + tl.load(row + 3)).to(tl.pointer_type(target_type))
    count, first, length = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    source_step, target_step = tl.load(row + 7), tl.load(row + 8)
    if aligned:
        count = tl.multiple_of(count, together)  # a mask that could end anywhere would part what moves at once
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        source_step, target_step = tl.multiple_of(source_step, source_unit), tl.multiple_of(target_step, target_unit)
    units_in_run = (length // together).to(tl.int32)
    run = first // length
    unit = ((first - run * length) // together).to(tl.int32) + tl.arange(0, tile // together)
    runs, columns = run + unit // units_in_run, (unit % units_in_run) * together
    at = tl.arange(0, together)[None, :]
    froms = (runs * source_step + columns)[:, None] + at
    tos = (runs * target_step + columns)[:, None] + at
    there = (tl.arange(0, tile // together) * together)[:, None] + at < count
    tl.store(target + tos, tl.load(source + froms, mask=there).to(target_type), mask=there)
