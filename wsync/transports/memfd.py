"""Slots in sealed anonymous shared memory: a descriptor that travels, no name, nothing to leak. Linux only."""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

import torch

from wsync.errors import ProtocolError, TransportError
from wsync.memory.host import available_bytes

_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_PAGE_BYTES = mmap.PAGESIZE


def create_slots(slot_bytes: int, num_slots: int) -> tuple[int, Sequence[torch.Tensor]]:
    """A sealed memfd, and its slots: uint8 `[slot_bytes]` each, every page present.

    The caller owns the descriptor. The memory lives as long as a descriptor or a view of a slot, in any process.
    Raises `TransportError` if the memory cannot be had.
    """
    nbytes = _stride(slot_bytes) * num_slots
    available = available_bytes()
    if available is None:
        raise TransportError("/proc/meminfo does not say how much memory is available")
    if nbytes > available:
        raise TransportError(
            f"{num_slots} slots of {slot_bytes} bytes need {nbytes} bytes of shared memory; {available} bytes are "
            f"available: lower bucket_bytes or num_slots"
        )
    import fcntl  # not on every system, and this module is imported on all of them

    fd = os.memfd_create("wsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, _map(fd, slot_bytes, num_slots)
    except OSError as error:
        os.close(fd)
        raise TransportError(f"cannot have {nbytes} bytes of shared memory for {num_slots} slots: {error}") from error


def open_slots(fd: int, slot_bytes: int, num_slots: int) -> Sequence[torch.Tensor]:
    """The same slots in another process. The descriptor stays the caller's.

    Raises `ProtocolError` if the memory is not sealed (a peer could shrink it, and reading would be fatal) or too
    small, `TransportError` if it cannot be mapped.
    """
    import fcntl

    needed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & needed != needed:
            raise ProtocolError("the sender's shared memory is not sealed")
        if os.fstat(fd).st_size != _stride(slot_bytes) * num_slots:
            raise ProtocolError(f"the sender's shared memory is not {num_slots} slots of {slot_bytes} bytes")
        return _map(fd, slot_bytes, num_slots)
    except OSError as error:
        raise TransportError(f"cannot map the sender's {num_slots} slots of {slot_bytes} bytes: {error}") from error


def _map(fd: int, slot_bytes: int, num_slots: int) -> Sequence[torch.Tensor]:
    stride = _stride(slot_bytes)
    mapping = mmap.mmap(fd, stride * num_slots)
    # The first touch of a fresh page costs several times a copy of it: pay here, not in the first sync.
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        mapping.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != 22:  # EINVAL: a kernel without it faults the pages in as they are used
            raise
    return [torch.frombuffer(mapping, dtype=torch.uint8, count=slot_bytes, offset=i * stride) for i in range(num_slots)]


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // _PAGE_BYTES) * _PAGE_BYTES
