"""Links between trainer rank 0 and every other rank, over which nothing is said but who is gone.

A round waits on a store and a transfer waits in gloo; neither hears that a rank was killed. Rank 0 hears it of every
other rank, since their links end, and tells the rest; all others hear it of rank 0. Where a link cannot be made, the
deadline decides as before.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.distributed_c10d import PrefixStore, Store

from wsync.deadline import FOREVER_S, Deadline
from wsync.errors import PeerError, ProtocolError, WsyncError
from wsync.protocols import Ticket
from wsync.transports.link import Link, address_of, wait_any
from wsync.transports.listener import Listener, Welcome, connect, listen_at, new_ticket

_CONNECT_S = 30.0
_SEND_S = 1.0


class Lifelines:
    """This rank's links. Attributes are guarded by `changed`.

    Attributes:
        lost: ranks whose process ended without closing its group, or whose host cannot be reached any more.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        """Local; nothing is connected."""
        self.changed = threading.Condition()
        self.lost: list[int] = []
        self._rank, self._world_size = rank, world_size
        self._listener: Listener | None = None
        self._links: dict[int, Link] = {}
        self._closed = False
        self._joining = False

    def invite(self, store: Store) -> Ticket | None:
        """On rank 0: what the other ranks need to link up; None if this rank has no address for them."""
        if self._listener is None:
            try:
                sock = listen_at(f"[{_own_host(store)}]:0")
            except (OSError, WsyncError):
                return None
            ticket = new_ticket("ranks", address_of(sock.getsockname()), 0)
            self._listener = Listener(sock, ticket, self._world_size - 1, first=1)
            self._start(self._watch)
        return self._listener.ticket

    def join(self, ticket: Ticket) -> None:
        """On every other rank: link up with rank 0, in the background."""
        if not self._joining:
            self._joining = True
            self._start(lambda: self._connect(ticket))

    def wait(self, done: Callable[[], bool], timeout_s: float, known: int = 0) -> bool:
        """Wait until `done()` or more than `known` ranks are lost; False after `timeout_s`. See `notify`."""
        with self.changed:
            return self.changed.wait_for(lambda: done() or len(self.lost) > known, timeout_s)

    def notify(self) -> None:
        """Let `wait` look again: what `done` says may have changed."""
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """Say good-bye, so that nobody takes it for a death, and hang up. Never raises."""
        with self.changed:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            with suppress(WsyncError):
                link.send(("bye",), Deadline.after(_SEND_S))
            link.shutdown()
        if self._listener is not None:
            self._listener.shutdown()

    def _start(self, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name="wsync trainer ranks", daemon=True).start()

    def _connect(self, ticket: Ticket) -> None:
        try:
            link, _ = connect(ticket, self._rank, Deadline.after(_CONNECT_S), peer="trainer rank 0")
        except WsyncError:
            return
        with self.changed:
            self._links[0] = link
            if self._closed:
                link.shutdown()
        self._watch()

    def _watch(self) -> None:
        """Listen until there is nobody to listen to. Runs on a thread of its own."""
        listener = self._listener
        try:
            while not self._closed and (self._links or listener is not None):
                filenos = [fd for link in self._links.values() for fd in link.filenos()]
                wait_any([*filenos, *(listener.filenos() if listener else ())], Deadline.after(FOREVER_S), "ranks")
                if listener is not None and not self._closed:
                    self._admit(listener)
                    if not listener.absent:
                        listener.close()
                        listener = None
                for rank in list(self._links):
                    self._hear(rank)
        finally:
            if listener is not None:
                listener.close()
            while self._links:
                _, link = self._links.popitem()
                with suppress(WsyncError):  # one that came while this side was closing has heard no good-bye yet
                    link.send(("bye",), Deadline.after(_SEND_S))
                link.close()

    def _admit(self, listener: Listener) -> None:
        for rank, link in listener.admit(Welcome()):
            with self.changed:
                self._links[rank] = link
            for other in self.lost:  # before it came
                with suppress(WsyncError):
                    link.send(("lost", other), Deadline.after(_SEND_S))

    def _hear(self, rank: int) -> None:
        try:
            while (frame := self._links[rank].receive()) is not None:
                match frame:
                    case ("lost", int(other)):
                        self._lose(other)
                    case ("bye",):
                        self._drop(rank)
                        return
                    case _:
                        raise ProtocolError(f"rank {rank} sent an unknown frame")
        except (PeerError, ProtocolError):
            self._drop(rank)
            if not self._closed:
                self._lose(rank)

    def _drop(self, rank: int) -> None:
        with self.changed:
            link = self._links.pop(rank)
        link.close()

    def _lose(self, rank: int) -> None:
        with self.changed:
            if rank not in self.lost:
                self.lost.append(rank)
            self.changed.notify_all()
        if not self._rank:
            for link in list(self._links.values()):
                with suppress(WsyncError):
                    link.send(("lost", rank), Deadline.after(_SEND_S))


def _own_host(store: Store) -> str:
    """The address of this host on the way to the store, which every rank reaches. Sends nothing."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", "127.0.0.1"), getattr(store, "port", 1)
    family, _, _, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(name)
        return str(probe.getsockname()[0])
