"""Trainer rank 0's end of the links between ranks: it collects what is posted and tells everybody."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import cast

from torch.distributed.distributed_c10d import PrefixStore, Store

from wsync import wire
from wsync.deadline import Deadline
from wsync.errors import ProtocolError, SyncTimeout, TransportError, WsyncError
from wsync.rank_links import DOOR, NEVER, SEND_S, At, Ends, Frame, check_length
from wsync.transports.link import address_of
from wsync.transports.listener import Listener, Welcome, listen_at, new_ticket
from wsync.wire import MAX_FRAME_BYTES

_LINGER_S = 30.0
_TOGETHER_BYTES = 1 << 20


class RankZero(Ends):
    """Meets `RankLinks`."""

    def __init__(self, world_size: int) -> None:
        """Local; nothing is connected."""
        super().__init__(world_size)
        self._listener: Listener | None = None
        self._posts: dict[At, dict[int, bytes]] = {}
        self._told: At = NEVER
        self._timer: threading.Timer | None = None

    def start(self, store: Store) -> None:
        """See `RankLinks`."""
        if self._listener is not None:
            return
        try:
            sock = listen_at(f"[{_own_host(store)}]:0")
        except (OSError, WsyncError) as error:
            raise TransportError(f"trainer rank 0 has no address for the other ranks: {error}") from error
        ticket = new_ticket("ranks", address_of(sock.getsockname()), 0)
        self._listener = Listener(sock, ticket, self._world_size - 1, first=1, max_bytes=MAX_FRAME_BYTES)
        store.set(DOOR, cast("str", wire.pack(ticket)))  # bytes are taken as they are; torch's stub says str
        self.run(self._serve)

    def post(self, at: At, message: bytes) -> None:
        """See `RankLinks`."""
        check_length(message)
        if not self._put(0, at, message):
            self._late = at

    def missing(self, at: At) -> Sequence[int]:
        """See `RankLinks`."""
        with self.changed:
            told = self._told == at  # or another thread is about to
            missing = [rank for rank in range(self._world_size) if rank not in self._posts.get(at, ())]
        if told:
            self.wait(lambda: self.settled(at), SEND_S, len(self.lost))
        return [] if self.settled(at) else missing

    def give_over(self, call: int) -> None:
        """See `RankLinks`."""
        with self.changed:
            self.over = max(self.over, call)
        self._tell(("over", call))

    def delivered(self) -> bool:
        """See `RankLinks`."""
        return True

    def close(self) -> None:
        """See `RankLinks`. If others have yet to hear what was posted here, the links stay a while for them."""
        with self.changed:
            self.closed = True
            owing = self._owing()
        if owing:
            self._timer = threading.Timer(_LINGER_S, self.hang_up)
            self._timer.daemon = True
            self._timer.start()
        else:
            self.hang_up()

    def hang_up(self) -> None:
        """See `Ends`."""
        super().hang_up()
        if self._listener is not None:
            self._listener.shutdown()

    def heard(self, rank: int, frame: Frame) -> None:
        """See `Ends`."""
        match frame:
            case ("post", int(call), int(step), bytes(message)):
                if not self._put(rank, (call, step), message):
                    self._send(rank, ("late", call, step))
            case ("ask", int(call), int(step)):
                with self.changed:
                    here = list(self._posts.get((call, step), ()))
                self._send(rank, ("here", call, step, here))
            case ("over", int(call)):
                self.give_over(call)
            case _:
                raise ProtocolError(f"rank {rank} sent an unknown frame")

    def lose(self, rank: int) -> None:
        """See `Ends`."""
        super().lose(rank)
        self._tell(("lost", rank))

    def _owing(self) -> bool:
        """Whether somebody is still to come for what rank 0 posted. Call with `changed` held."""
        return any(0 in posts for (call, _), posts in self._posts.items() if call > self.over)

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
            done = self.closed and not self._owing()
        if done:
            self.hang_up()
        return True

    def _tell(self, frame: Frame) -> None:
        for rank in list(self.links):
            self._send(rank, frame)

    def _send(self, rank: int, frame: Frame) -> None:
        link = self.links.get(rank)
        if link is None:
            return
        try:
            link.send(frame, Deadline.after(SEND_S))
        except SyncTimeout:
            link.shutdown()  # half a frame is of no use; the thread that listens hears of the end
        except WsyncError:
            pass  # it hears of this, too

    def _serve(self) -> None:
        """Listen until there is nobody to listen to."""
        listener = self._listener
        try:
            while self.links or (listener is not None and not self.hung_up):
                self.listen(listener.filenos() if listener is not None else ())
                if listener is not None and not self.hung_up:
                    self._admit(listener)
                    if not listener.absent:
                        listener.close()
                        listener = None
        finally:
            if listener is not None:
                listener.close()
            if self._timer is not None:
                self._timer.cancel()
            self.leave()

    def _admit(self, listener: Listener) -> None:
        with suppress(TransportError):  # no descriptor is left: whoever waits at the door comes in later
            for rank, link in listener.admit(Welcome()):
                with self.changed:
                    self.links[rank] = link
                    news: list[Frame] = [("lost", other) for other in self.lost]
                    news += [("over", self.over)] if self.over >= 0 else []
                for frame in news:
                    self._send(rank, frame)


def _frames(at: At, messages: Sequence[bytes]) -> Iterator[Frame]:
    """Short messages travel together, a long one alone."""
    together: list[bytes] = []
    for message in messages:
        if together and sum(map(len, together)) + len(message) > _TOGETHER_BYTES:
            yield ("all", *at, together)
            together = []
        together.append(message)
    yield ("all", *at, together)


def _own_host(store: Store) -> str:
    """The address of this host on the way to the store, which every rank reaches. Sends nothing."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", "127.0.0.1"), getattr(store, "port", 1)
    family, _, _, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(name)
        return str(probe.getsockname()[0])
