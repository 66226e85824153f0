"""The end of the links between trainer ranks that every rank but 0 has."""

import time
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from wsync import wire
from wsync.deadline import Deadline
from wsync.errors import PeerError, ProtocolError, SyncTimeout, WsyncError
from wsync.protocols import Ticket
from wsync.rank_links import DOOR, SEND_S, At, Ends, Frame, check_length
from wsync.transports.link import Link
from wsync.transports.listener import connect
from wsync.wire import MAX_FRAME_BYTES

_ASK_S = 2.0
_CONNECT_S = 30.0
_LINGER_S = 30.0
_FIRST_LOOK_S, _LAST_LOOK_S = 1e-3, 5e-2


class OtherRank(Ends):
    """Meets `RankLinks`."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Local; nothing is connected."""
        super().__init__(world_size)
        self._rank = rank
        self._started = self._met = False
        self._unsent: list[Frame] = []
        self._here: tuple[At, Sequence[int]] | None = None

    def start(self, store: Store) -> None:
        """See `RankLinks`."""
        if not self._started:
            self._started = True
            self.run(lambda: self._join(store))

    def post(self, at: At, message: bytes) -> None:
        """See `RankLinks`."""
        check_length(message)
        self._say(("post", *at, message))

    def missing(self, at: At) -> Sequence[int]:
        """See `RankLinks`."""
        self._here = None
        self._say(("ask", *at))
        self.wait(lambda: self.settled(at) or self._answered(at), _ASK_S, len(self.lost))
        with self.changed:
            answered, here = self._here if self._here is not None else (None, ())
        missing = [rank for rank in range(self._world_size) if rank not in here] if answered == at else [0]
        if not missing:  # then it is about to tell
            self.wait(lambda: self.settled(at), _ASK_S, len(self.lost))
        return [] if self.settled(at) else missing or [0]

    def give_over(self, call: int) -> None:
        """See `RankLinks`."""
        self._say(("over", call))

    def delivered(self) -> bool:
        """See `RankLinks`."""
        return not self._unsent or bool(self.trouble)

    def close(self) -> None:
        """See `RankLinks`."""
        self.closed = True
        self.hang_up()

    def heard(self, rank: int, frame: Frame) -> None:
        """See `Ends`."""
        with self.changed:
            match frame:
                case ("all", int(call), int(step), tuple(messages)):
                    there, before = self._whole
                    self._whole = ((call, step), [*(before if there == (call, step) else ()), *messages])
                case ("late", int(call), int(step)):
                    self._late = (call, step)
                case ("here", int(call), int(step), tuple(ranks)):
                    self._here = ((call, step), ranks)
                case ("over", int(call)):
                    self.over = max(self.over, call)
                case ("lost", int(other)):
                    self.lose(other)
                case _:
                    raise ProtocolError("rank 0 sent an unknown frame")
            self.changed.notify_all()

    def _answered(self, at: At) -> bool:
        return self._here is not None and self._here[0] == at

    def _say(self, frame: Frame) -> None:
        with self.changed:
            link = self.links.get(0)
            if not self._met:
                self._unsent.append(frame)
        if link is not None:
            with suppress(PeerError, SyncTimeout):  # the thread that listens hears of it
                link.send(frame, Deadline.after(SEND_S))

    def _join(self, store: Store) -> None:
        """Find rank 0 as soon as it is there, then listen to it."""
        try:
            link = self._find(store)
        except (RuntimeError, WsyncError) as error:
            with self.changed:
                self.trouble = str(error)
                self.changed.notify_all()
            return
        if link is None:
            return
        with self.changed:
            with suppress(WsyncError):  # heard of below
                for frame in self._unsent:
                    link.send(frame, Deadline.after(SEND_S))
            self._unsent = []
            self.links[0], self._met = link, True
            self.changed.notify_all()
        if self.closed:
            self.hang_up()
        try:
            while self.links:
                self.listen()
        finally:
            self.leave()

    def _find(self, store: Store) -> Link | None:
        """None if this rank has closed meanwhile, and has nothing more to say."""
        pause_s, until = _FIRST_LOOK_S, time.monotonic() + _LINGER_S
        while not store.check([DOOR]):
            if self.closed and (not self._unsent or time.monotonic() > until):
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        ticket = wire.unpack(store.get(DOOR))
        if not isinstance(ticket, Ticket):
            raise ProtocolError("the store holds something else where trainer rank 0 tells its address")
        deadline = Deadline.after(_CONNECT_S)
        return connect(ticket, self._rank, deadline, peer="trainer rank 0", max_bytes=MAX_FRAME_BYTES)[0]
