"""Groups of gloo, for slots in host memory.

Nothing is registered with torch.distributed: the default group, if there is one, is never touched. A wait inside gloo
cannot be interrupted when a peer dies in the middle of a message; it ends at the group's timeout. So nobody waits for
the thread that does, if the control channel says that the peer is gone.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from wsync.deadline import Deadline
from wsync.topology import CPU, Topology
from wsync.transports.collective_group import Fact, Seat, allocate
from wsync.transports.slots import SlotMemory

Broadcast = Callable[[torch.Tensor], None]
"""From rank 0 to all others; returns when this rank's part is done."""


def gloo_broadcast(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Broadcast:
    """Form a group of `size` ranks and return its broadcast. Blocks until all of them are here.

    Args:
        store: reached by all of them, and used for nothing else.
        rank: this process; 0 sends.
        size: number of ranks.
        host: address of this host at which the others reach it.
        timeout_s: longest time, in seconds, for forming the group and for each broadcast.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    group = gloo(store, rank, size, options)
    how = dist.BroadcastOptions()
    how.rootRank = 0

    def broadcast(tensor: torch.Tensor) -> None:
        group.broadcast([tensor], how).wait()

    return broadcast


class GlooBackend:
    """See `Backend`. Both sides need nothing in common but torch."""

    def refuse(self, topology: Topology) -> str | None:
        """See `Backend`."""
        if not dist.is_available() or not dist.is_gloo_available():
            return "this build of torch has no gloo"
        for worker in topology.receivers:
            if worker.device != "cpu":
                return f"a worker is {worker}: its weights are not in host memory"
        return None

    def facts(self, device: torch.device) -> Sequence[Fact]:
        """See `Backend`."""
        return ()

    def compare(self, facts: Sequence[Fact]) -> None:
        """See `Backend`."""

    def memory(self, slot_bytes: int, num_slots: int, device: torch.device | None) -> SlotMemory:
        """See `Backend`. In host memory, wherever the weights are."""
        return SlotMemory(allocate(slot_bytes, num_slots, CPU))

    def form(self, seat: Seat, memory: SlotMemory, check: Callable[[], None]) -> "_Group":
        """See `Backend`."""
        return _Group(gloo_broadcast(BoardStore(seat, check), seat.rank, seat.size, seat.here, seat.timeout_s))


class BoardStore(Store):
    """A board as gloo wants it. What `check` raises ends whatever waits for the other ranks."""

    def __init__(self, seat: Seat, check: Callable[[], None]) -> None:
        super().__init__()
        self._board, self._check, self._deadline = seat.board, check, Deadline.after(seat.timeout_s)

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._board.post(key, value)

    def get(self, key: str) -> bytes:
        return self._board.read(key, self._deadline, self._check)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class _Group:
    """See `Group`. A broadcast is done when it has begun: nothing on the host puts work after it."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast

    def start(self, slot: int, tensor: torch.Tensor) -> Callable[[], bool]:
        self._broadcast(tensor)
        return lambda: True

    def close(self) -> None:
        """The group ends with its last reference; gloo cannot be ended otherwise."""
