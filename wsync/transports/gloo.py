"""Groups of gloo, for slots in host memory.

Nothing is registered with torch.distributed: the default group, if there is one, is never touched. A wait inside gloo
cannot be interrupted when a peer dies in the middle of a message; it ends at the group's timeout. So nobody waits for
the thread that does, if the control channel says that the peer is gone.
"""

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from wsync.errors import ProtocolError
from wsync.topology import CPU, Topology
from wsync.transports.collective_group import Fact, Form, Key, Seat, allocate
from wsync.transports.listener import listen_at
from wsync.transports.slots import SlotMemory

Broadcast = Callable[[torch.Tensor], None]
"""From rank 0 to all others; returns when this rank's part is done."""


def host_store(host: str, timeout_s: float) -> tuple[Store, int]:
    """A key-value store at a free port of `host`, bound to that address only, and the port."""
    sock: socket.socket = listen_at(f"[{host}]:0")
    port = int(sock.getsockname()[1])
    patience = timedelta(seconds=timeout_s)
    # The store owns the descriptor from here on. Left to itself it would listen on every address of this host.
    return TCPStore(host, port, None, True, patience, False, master_listen_fd=sock.detach()), port


def join_store(host: str, port: int, timeout_s: float) -> Store:
    """The store that `host_store` made in another process."""
    return TCPStore(host, port, None, False, timedelta(seconds=timeout_s), False)


def gloo_broadcast(store: Store, name: str, rank: int, size: int, host: str, timeout_s: float) -> Broadcast:
    """Form a group of `size` ranks and return its broadcast. Blocks until all of them are here.

    Args:
        store: reached by all of them.
        name: of this group, never used before in `store`.
        rank: this process; 0 sends.
        size: number of ranks.
        host: address of this host at which the others reach it.
        timeout_s: longest time, in seconds, for forming the group and for each broadcast.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    group = gloo(PrefixStore(name, store), rank, size, options)
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

    def invite(self, seat: Seat, memory: SlotMemory) -> tuple[Key, Form]:
        """See `Backend`. The key is the port of a store."""
        store, port = host_store(seat.here, seat.timeout_s)
        return port, partial(_form, lambda: store, seat)

    def join(self, key: Key, seat: Seat, memory: SlotMemory) -> Form:
        """See `Backend`."""
        if not isinstance(key, int):
            raise ProtocolError("the sender named no port where its group meets")
        return partial(_form, lambda: join_store(seat.sender, key, seat.timeout_s), seat)


def _form(reach: Callable[[], Store], seat: Seat, check: Callable[[], None]) -> "_Group":
    return _Group(gloo_broadcast(reach(), seat.name, seat.rank, seat.size, seat.here, seat.timeout_s))


class _Group:
    """See `Group`. A broadcast is done when it has begun: nothing on the host puts work after it."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast

    def start(self, slot: int, tensor: torch.Tensor) -> Callable[[], bool]:
        self._broadcast(tensor)
        return lambda: True

    def close(self) -> None:
        """The group ends with its last reference; gloo cannot be ended otherwise."""
