"""Host memory for what is away from the device: allocated once, pinned where the device is CUDA, and used again.

Memory is mapped page by page and registered with CUDA. PyTorch's own pinned memory comes in powers of two, takes
several times as long to get, and is not given back.
"""

import mmap
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from wsync.errors import AdmissionError, ClosedError, ConfigError
from wsync.memory.host import available_bytes
from wsync.memory.sizes import gib

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of this process."""

_pools: "weakref.WeakSet[HostPool]" = weakref.WeakSet()


def pinned_bytes() -> int:
    """Bytes of host memory that all pools of this process hold pinned."""
    return sum(pool.pinned_nbytes for pool in list(_pools))


@dataclass(frozen=True, slots=True)
class Block:
    """Host memory of one size, uint8 `[nbytes]`."""

    tensor: torch.Tensor
    pinned: bool

    @classmethod
    def allocate(cls, nbytes: int, pinned: bool) -> "Block":
        """New memory. Raises `AdmissionError` if CUDA does not pin it."""
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
        if pinned:
            pages.madvise(mmap.MADV_DONTFORK)  # a fork may leave the parent with other pages than those of the device
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(cudart.cudaHostRegister(tensor.data_ptr(), nbytes, _PORTABLE))
            if code:
                with suppress(RuntimeError):  # the next kernel would be blamed for it
                    torch.empty(1, device="cuda").fill_(0)
                raise AdmissionError(
                    f"CUDA could not pin {gib(nbytes)} of host memory (cudaHostRegister gave error {code}); "
                    f"see the limit on locked memory (ulimit -l) and that of the container"
                )
        return cls(tensor, pinned)

    def unpin(self) -> None:
        """Take it away from CUDA; the memory itself goes with its last tensor."""
        if self.pinned:
            with suppress(RuntimeError):  # what went wrong on the device before
                torch.cuda.synchronize()  # a copy that was given up may still run
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self.tensor.data_ptr())


@dataclass(slots=True)
class _Shelf:
    """What one owner holds."""

    blocks: list[Block] = field(default_factory=list)
    in_use: bool = False

    @property
    def nbytes(self) -> int:
        return sum(block.tensor.numel() for block in self.blocks)


class HostPool:
    """Blocks of host memory by owner. What an owner has put back is kept, and is his again the next time.

    Args:
        budget_bytes: most that the pool may hold; None: what the machine has.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        if budget_bytes is not None and budget_bytes < 0:
            raise ConfigError(f"budget_bytes is {budget_bytes}; it must be 0 or more, or None for no budget")
        self.budget_bytes = budget_bytes
        self._shelves: dict[str, _Shelf] = {}
        self._closed = False
        self._lock = threading.Lock()
        _pools.add(self)
        # Memory that is unmapped while CUDA has it registered cannot be registered again.
        self._finalizer = weakref.finalize(self, _unpin_all, self._shelves)

    @property
    def nbytes(self) -> int:
        """Bytes that the pool holds, in use or kept for the next time."""
        return sum(shelf.nbytes for shelf in list(self._shelves.values()))

    @property
    def pinned_nbytes(self) -> int:
        """Those of them that are pinned."""
        blocks = [block for shelf in list(self._shelves.values()) for block in list(shelf.blocks)]
        return sum(block.tensor.numel() for block in blocks if block.pinned)

    @property
    def holders(self) -> Mapping[str, int]:
        """Owner -> bytes that the pool holds for him."""
        return {owner: shelf.nbytes for owner, shelf in list(self._shelves.items())}

    def check(self, owner: str, sizes: Sequence[int], *, pinned: bool) -> None:
        """Raise what `take` would refuse with."""
        with self._lock:
            self._check(owner, sizes, pinned)

    def take(self, owner: str, sizes: Sequence[int], *, pinned: bool) -> list[torch.Tensor]:
        """Blocks of these sizes for `owner`, each uint8 `[size]`, to be put back together.

        A block that `owner` had before is the same memory again for the same size, in whatever order sizes come.
        Those that fit no size any more are freed.

        Raises:
            AdmissionError: the budget or the machine has no room; nothing has changed, or blocks that were kept for
                the next time are gone.
            ConfigError: blocks of that owner are in use.
            ClosedError: the pool is closed.
        """
        with self._lock:
            fitting, stale, missing = self._check(owner, sizes, pinned)
            shelf = self._shelves.setdefault(owner, _Shelf())
            _unpin(stale)
            del stale  # before new memory is asked for
            shelf.blocks = fitting
            for nbytes in missing:
                shelf.blocks.append(self._allocate(nbytes, pinned))
            shelf.in_use = True
            by_size: dict[int, list[torch.Tensor]] = {}
            for block in reversed(shelf.blocks):
                by_size.setdefault(block.tensor.numel(), []).append(block.tensor)
        return [by_size[nbytes].pop() for nbytes in sizes]

    def put_back(self, owner: str) -> None:
        """The bytes in `owner`'s blocks are not needed any more; the memory is kept for him."""
        self._shelves[owner].in_use = False

    def close(self) -> None:
        """Free everything. What still holds a block keeps its bytes, unpinned. May be called again."""
        self._closed = True
        self._finalizer()
        self._shelves.clear()

    def _allocate(self, nbytes: int, pinned: bool) -> Block:
        return Block.allocate(nbytes, pinned)

    def _check(self, owner: str, sizes: Sequence[int], pinned: bool) -> tuple[list[Block], list[Block], list[int]]:
        """Blocks to use again, blocks to free, sizes to allocate."""
        if self._closed:
            raise ClosedError(f"the host memory for {owner} is closed")
        shelf = self._shelves.get(owner, _Shelf())
        if shelf.in_use:
            raise ConfigError(f"two things named {owner!r} use the same host memory; give each a name of its own")
        wanted = Counter(sizes)
        fitting: list[Block] = []
        stale: list[Block] = []
        for block in shelf.blocks:
            size = block.tensor.numel()
            fits = block.pinned == pinned and wanted[size] > 0
            (fitting if fits else stale).append(block)
            wanted[size] -= fits
        missing = list(wanted.elements())
        self._admit(owner, sum(missing), sum(block.tensor.numel() for block in stale))
        return fitting, stale, missing

    def _admit(self, owner: str, needed: int, given_up: int) -> None:
        held, available = self.nbytes, available_bytes()
        holders = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in self.holders.items() if nbytes) or "nothing"
        what = f"{owner} needs {needed} more bytes ({gib(needed)}) of host memory"
        if self.budget_bytes is not None and held - given_up + needed > self.budget_bytes:
            raise AdmissionError(
                f"{what}; the budget is {gib(self.budget_bytes)} and the pool holds {gib(held)}: {holders}. "
                f"Raise the budget, or leave something on the device"
            )
        if available is not None and needed > available + given_up:
            raise AdmissionError(
                f"{what}; this machine has {gib(available)} left and the pool holds {gib(held)}: {holders}. "
                f"Leave something on the device, or free host memory"
            )


def _unpin(blocks: Iterable[Block]) -> None:
    for block in blocks:
        block.unpin()


def _unpin_all(shelves: Mapping[str, _Shelf]) -> None:
    for shelf in shelves.values():
        _unpin(shelf.blocks)
