"""A process group of wsync's own for one sender and its receivers, and the thread that waits in it.

Nothing is registered with torch.distributed: the default group, if there is one, is never touched. A wait inside gloo
cannot be interrupted when a peer dies in the middle of a message; it ends at the group's timeout. So nobody waits for
the thread that does, if the control channel says that the peer is gone.
"""

import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from wsync.transports.listener import listen_at

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


class Mover:
    """Runs broadcasts in order on a thread of its own, which forms the group first."""

    def __init__(
        self, form: Callable[[], Broadcast], moved: Callable[[int], None], failed: Callable[[Exception], None]
    ) -> None:
        """Start. `moved` is told the number of each broadcast that is done, `failed` why no more will be."""
        self._queue: queue.SimpleQueue[tuple[int, torch.Tensor] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_move, args=(self._queue, form, moved, failed), name="wsync broadcasts", daemon=True
        )
        self._thread.start()

    def put(self, number: int, tensor: torch.Tensor) -> None:
        """Broadcast `tensor` (contiguous uint8, not used by anybody until `moved(number)`)."""
        self._queue.put((number, tensor))

    def stop(self, timeout_s: float) -> None:
        """End after what is queued. Waits no longer than `timeout_s` seconds for a broadcast that does not end."""
        self._queue.put(None)
        self._thread.join(timeout_s)


def _move(
    waiting: "queue.SimpleQueue[tuple[int, torch.Tensor] | None]",
    form: Callable[[], Broadcast],
    moved: Callable[[int], None],
    failed: Callable[[Exception], None],
) -> None:
    try:
        broadcast = form()
        while (item := waiting.get()) is not None:
            number, tensor = item
            if tensor.numel():
                broadcast(tensor)
            del item, tensor
            moved(number)
    except Exception as error:
        failed(error)
