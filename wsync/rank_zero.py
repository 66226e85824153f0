"""Trainer rank 0's end of the links between ranks: it collects what is posted and tells everybody."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress

from torch.distributed.distributed_c10d import PrefixStore, Store

from wsync.deadline import FOREVER_S
from wsync.errors import ProtocolError, SyncTimeout, TransportError, WsyncError
from wsync.mailbox import Mailbox
from wsync.rank_links import DOOR, NEVER, At, Frame, RankLinks, check_length
from wsync.transports.dial import is_loopback
from wsync.transports.link import address_of
from wsync.transports.listener import Listener, Welcome, listen_at, new_ticket
from wsync.wire import MAX_FRAME_BYTES

_DOOR_SHUT_S = 0.5
"""How long nobody is let in when the system has no descriptor left: else those who wait would keep us busy."""

_TOGETHER_BYTES = 1 << 20


class RankZero(RankLinks):
    """See `RankLinks`."""

    def __init__(self, world_size: int, store: Store | None) -> None:
        """Local; nothing is connected. The host of `store` tells which address of this host others reach."""
        super().__init__(0, world_size)
        self._store = store
        self._listener: Listener | None = None
        self._met: set[int] = set()
        self._posts: dict[At, dict[int, bytes]] = {}
        self._told: At = NEVER

    @property
    def unmet(self) -> Sequence[int]:
        """See `RankLinks`."""
        return [rank for rank in range(1, self._world_size) if rank not in self._met]

    def start(self, mailbox: Mailbox) -> None:
        """See `RankLinks`."""
        if self._listener is not None:
            return
        try:
            sock = listen_at(f"[{_own_host(self._store)}]:0")
        except (OSError, WsyncError) as error:
            raise TransportError(f"trainer rank 0 has no address for the other ranks: {error}") from error
        ticket = new_ticket("ranks", address_of(sock.getsockname()), 0)
        listener = Listener(sock, ticket, self._world_size - 1, first=1, max_bytes=MAX_FRAME_BYTES)
        self.run(lambda: self._serve(mailbox, listener))
        self._listener = listener

    def post(self, at: At, message: bytes) -> None:
        """See `RankLinks`."""
        check_length(message)
        if not self._put(0, at, message):
            self._late = at

    def missing(self, at: At) -> Sequence[int]:
        """See `RankLinks`."""
        with self.changed:
            telling = self._told == at  # on the thread that listens
            missing = [rank for rank in range(self._world_size) if rank not in self._posts.get(at, ())]
        if telling:
            self.wait_for(lambda: self.settled(at), FOREVER_S)
        return [] if self.settled(at) else missing

    def give_over(self, call: int, absent: Sequence[int]) -> None:
        """See `RankLinks`."""
        with self.changed:
            known = call <= self.over
            self.end(call, absent)
            self._posts = {at: posts for at, posts in self._posts.items() if at > (call, 0)}
        if not known:  # else everybody has been told
            self._tell(("over", call, list(absent)))

    def close(self) -> None:
        """See `RankLinks`."""
        super().close()
        if self._listener is not None:
            self._listener.shutdown()

    def heard(self, rank: int, frame: Frame) -> None:
        """See `RankLinks`."""
        match frame:
            case ("post", int(call), int(step), bytes(message)):
                if not self._put(rank, (call, step), message):
                    self.say(("late", call, step), rank)
            case ("ask", int(call), int(step)):
                with self.changed:
                    here = list(self._posts.get((call, step), ()))
                self.say(("here", call, step, here), rank)
            case ("over", int(call), tuple(absent)):
                self.give_over(call, absent)
            case _:
                raise ProtocolError(f"rank {rank} sent an unknown frame")

    def leave(self, rank: int) -> None:
        """See `RankLinks`."""
        super().leave(rank)
        self._tell(("left", rank))

    def lose(self, rank: int) -> None:
        """See `RankLinks`."""
        super().lose(rank)
        self._tell(("lost", rank))

    def _put(self, rank: int, at: At, message: bytes) -> bool:
        """Keep it, or tell everybody if it is the last one. False if it is the first step of a call that is over."""
        call, step = at
        with self.changed:
            if not step and call <= self.over:
                return False
            if at <= self._told:
                return True  # said again
            posts = self._posts.setdefault(at, {})
            posts[rank] = message
            if len(posts) < self._world_size:
                return True
            self._told = at
        messages = [posts[rank] for rank in range(self._world_size)]
        for frame in _frames(at, messages):
            self._tell(frame)
        with self.changed:  # last: whoever reads it here may close
            self._whole = (at, messages)
            # Whoever has posted here waits for no earlier step.
            self._posts = {other: kept for other, kept in self._posts.items() if other > at}
            self.changed.notify_all()
        return True

    def _tell(self, frame: Frame) -> None:
        self.say(frame, *range(1, self._world_size))

    def _serve(self, mailbox: Mailbox, listener: Listener) -> None:
        """Let the others in and listen, until there is nobody to listen to. Runs on a thread of its own."""
        try:
            mailbox.put(DOOR, listener.ticket)
            while not self.closed and listener.absent:
                with suppress(SyncTimeout):
                    self._admit(listener)
            listener.close()
            while self.links:
                self.listen()
        except Exception as error:
            self.fail(TransportError(f"trainer rank 0 has lost the other ranks: {type(error).__name__}: {error}"))
        finally:
            listener.close()
            for rank in list(self.links):
                self._drop(rank)

    def _admit(self, listener: Listener) -> None:
        try:
            self.listen(listener.filenos())
            for rank, link in listener.admit(Welcome()):
                with self.changed:
                    self.meet(rank, link)
                    self._met.add(rank)
                    closed, news = self.closed, [("lost", other) for other in self.lost]
                    news += [("left", other) for other in self.left]
                    over = ("over", self.over, list(self._absent[1]))
                for frame in [*news, *([over] if self.over > NEVER[0] else [])]:
                    self.say(frame, rank)
                if closed:
                    self.part(rank)
        except TransportError:
            self.listen(timeout_s=_DOOR_SHUT_S)


def _frames(at: At, messages: Sequence[bytes]) -> Iterator[Frame]:
    """Short messages travel together, a long one alone."""
    together: list[bytes] = []
    nbytes = 0
    for message in messages:
        if together and nbytes + len(message) > _TOGETHER_BYTES:
            yield ("all", *at, together)
            together, nbytes = [], 0
        together.append(message)
        nbytes += len(message)
    yield ("all", *at, together)


def _own_host(store: Store | None) -> str:
    """The address of this host on the way to the store, which every rank reaches. Sends nothing.

    If the store is at a name of this host that means itself, as Debian's do, it is every address: others know the name.
    """
    host, port = store_address(store)
    family, _, _, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(name)
        own = str(probe.getsockname()[0])
    if is_loopback(own) and not is_loopback(host):
        return "::" if family == socket.AF_INET6 else "0.0.0.0"
    return own


def store_address(store: Store | None) -> tuple[str, int]:
    """Host and port of the store; of this host if it has none, as a store in files."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", "127.0.0.1")), int(getattr(store, "port", 1))
