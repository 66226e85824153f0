"""Strided copies out of the memory of other processes of this host, by `process_vm_readv`: one copy, no shared memory.

The kernel allows it to a process of the same user unless a security module says otherwise (Yama's `ptrace_scope`).
"""

import ctypes
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from wsync.errors import PeerError, TransportError
from wsync.pull.exports import Export
from wsync.regions import Region
from wsync.runs import IntArray
from wsync.strided import memory_view
from wsync.views import Pair, Place, as_dtype, first_elements, outer_dims

_IOV_MAX = 1024
"""Most runs in one call; Linux has no more."""

_CALL_BYTES = 1 << 30
"""Most bytes in one call: it transfers no more than 2 GiB."""

_SCRATCH_BYTES = 8 << 20
"""Memory for values that are cast on the way, in bytes."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """Memory of a process: `nbytes` from `address` on."""

    pid: int
    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Runs:
    """Runs of bytes from one foreign memory to one target, both counted from the first byte."""

    source: int
    target: int
    froms: IntArray
    tos: IntArray
    nbytes: int
    """Of each run."""


@dataclass(frozen=True, slots=True)
class _Cast:
    """Elements that take another dtype on the way."""

    runs: _Runs
    """Into a row-major scratch of the target's sizes, in the source's dtype."""

    dtype: torch.dtype
    """Of the source."""

    place: Place
    """Of the target."""

    def read(self, foreign: Foreign, target: torch.Tensor) -> None:
        """Through a scratch into `target`."""
        runs, region = self.runs, self.place.region
        scratch = torch.empty(region.sizes, dtype=self.dtype)
        _read_runs(foreign.pid, [(foreign.address + runs.froms, scratch.data_ptr() + runs.tos, runs.nbytes)])
        memory_view(as_dtype(target, self.place.dtype), region).copy_(scratch)


class HostMemories:
    """Memories of processes of this host. See `wsync.pull.sources.Memories`."""

    def __init__(self, exports: Sequence[Export]) -> None:
        self._foreign = [
            memory for one in exports for memory in foreign_memories(one.endpoint.pid, one.addresses, one.sizes)
        ]

    def reads(self, pairs: Sequence[Pair]) -> "HostReads":
        """See `Memories`."""
        return HostReads(pairs, self._foreign)

    def close(self) -> None:
        """Nothing was opened."""


class HostReads:
    """Copies that are worked out once and run at every sync. See `wsync.pull.sources.Reads`."""

    def __init__(self, pairs: Sequence[Pair], sources: Sequence[Foreign]) -> None:
        """`pairs`: from places in `sources` to places in targets, all in host memory."""
        self._sources = sources
        self.seconds = 0.0
        self._runs: list[_Runs] = []
        self._casts: list[_Cast] = []
        for pair in pairs:
            source, target = pair
            if source.dtype == target.dtype:
                self._runs.append(_runs(pair))
            else:
                self._casts += _casts(pair)
        self.nbytes = sum(source.region.numel * source.dtype.itemsize for source, _ in pairs)

    def run(self, targets: Sequence[torch.Tensor], key: object | None = None) -> None:
        """Read; it is there when this returns.

        Raises `PeerError` if a process is gone, `TransportError` if its memory cannot be read.
        """
        begin = time.perf_counter()
        self._run(self._sources, targets)
        self.seconds = time.perf_counter() - begin

    def _run(self, sources: Sequence[Foreign], targets: Sequence[torch.Tensor]) -> None:
        by_process = defaultdict[int, list[tuple[IntArray, IntArray, int]]](list)
        starts = [target.data_ptr() for target in targets]
        for runs in self._runs:
            foreign = sources[runs.source]
            moves = (foreign.address + runs.froms, starts[runs.target] + runs.tos, runs.nbytes)
            by_process[foreign.pid].append(moves)
        for pid, all_moves in by_process.items():
            _read_runs(pid, all_moves)
        for cast in self._casts:
            cast.read(sources[cast.runs.source], targets[cast.runs.target])


def read(foreign: Foreign) -> bytes:
    """All of it. Raises as `HostReads.run`."""
    buffer = torch.empty(foreign.nbytes, dtype=torch.uint8)
    one = np.zeros(1, np.int64)
    _read_runs(foreign.pid, [(one + foreign.address, one + buffer.data_ptr(), foreign.nbytes)])
    return buffer.numpy().tobytes()


def _runs(pair: Pair) -> _Runs:
    """What is contiguous on both sides, in the order of the elements."""
    source, target = pair
    dims, length = outer_dims(pair)
    froms, tos = first_elements(pair, dims)
    itemsize = source.dtype.itemsize
    return _Runs(source.memory, target.memory, froms * itemsize, tos * itemsize, length * itemsize)


def _casts(pair: Pair) -> Iterator[_Cast]:
    """A few rows at a time, so that the values of each fit into a little memory of this process."""
    source, target = pair
    rows = source.region.sizes[0] if source.region.sizes else 1
    each = max(1, source.region.numel // max(rows, 1)) * source.dtype.itemsize
    step = max(1, _SCRATCH_BYTES // each)
    for start in range(0, rows, step):
        part, there = (_rows(place, start, min(step, rows - start)) for place in pair)
        dense = Place(memory=target.memory, dtype=source.dtype, region=Region.whole(part.region.sizes))
        yield _Cast(_runs((part, dense)), source.dtype, there)


def _rows(place: Place, start: int, count: int) -> Place:
    region = place.region
    if not region.sizes:
        return place
    first = Region(region.offset + start * region.strides[0], (count, *region.sizes[1:]), region.strides)
    return replace(place, region=first)


def _read_runs(pid: int, moves: Sequence[tuple[IntArray, IntArray, int]]) -> None:
    for remote, local in _batches(moves):
        wanted = int(remote[:, 1].sum())
        got = _libc().process_vm_readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
        if got != wanted:
            raise _refused(pid, got, wanted)


def _batches(moves: Sequence[tuple[IntArray, IntArray, int]]) -> Iterator[tuple[IntArray, IntArray]]:
    """iovec arrays, int64 `[runs, 2]` (address, bytes), of the other process and of this one."""
    remotes, locals_ = [], []
    for froms, tos, nbytes in moves:
        for start in range(0, nbytes, _CALL_BYTES) or (0,):
            size = min(_CALL_BYTES, nbytes - start)
            remotes.append(np.stack([froms + start, np.full(len(froms), size)], axis=1))
            locals_.append(np.stack([tos + start, np.full(len(tos), size)], axis=1))
    remote, local = np.concatenate(remotes), np.concatenate(locals_)
    begin = 0
    while begin < len(remote):
        ends = np.cumsum(remote[begin : begin + _IOV_MAX, 1])
        count = max(1, int(np.searchsorted(ends, _CALL_BYTES, side="right")))
        piece = slice(begin, begin + count)
        yield np.ascontiguousarray(remote[piece]), np.ascontiguousarray(local[piece])
        begin += count


def _refused(pid: int, got: int, wanted: int) -> Exception:
    number = ctypes.get_errno() if got < 0 else 0
    reason = os.strerror(number) if got < 0 else f"{got} of {wanted} bytes came"
    if number == 3:  # ESRCH
        return PeerError(f"process {pid}, whose memory is read, is gone")
    cure = "; Yama's ptrace_scope or a container may forbid it" if number == 1 else ""
    return TransportError(f"the memory of process {pid} cannot be read: {reason}{cure}")


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    pointer, count = ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
    return libc


def foreign_memories(pid: int, addresses: Sequence[int], sizes: Sequence[int]) -> list[Foreign]:
    """Memories of one process."""
    return [Foreign(pid, address, nbytes) for address, nbytes in zip(addresses, sizes, strict=True)]
