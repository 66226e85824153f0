"""The end of the links between trainer ranks that every rank but 0 has."""

import ipaddress
import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from wsync.deadline import Deadline
from wsync.errors import ProtocolError, RankError, TransportError, WsyncError
from wsync.mailbox import Mailbox
from wsync.protocols import Ticket
from wsync.rank_links import DOOR, At, Frame, RankLinks, check_length
from wsync.rank_zero import store_address
from wsync.transports.dial import address_parts
from wsync.transports.link import Link
from wsync.transports.listener import connect
from wsync.wire import MAX_FRAME_BYTES

_ASK_S = 2.0
_CONNECT_S = 30.0
_FIRST_LOOK_S, _LAST_LOOK_S = 1e-3, 5e-2


class OtherRank(RankLinks):
    """See `RankLinks`."""

    def __init__(self, rank: int, world_size: int, store: Store | None) -> None:
        """Local; nothing is connected."""
        super().__init__(rank, world_size)
        self._store = store
        self._started = self._met = False
        self._unsent: list[Frame] = []
        self._here: tuple[At, Sequence[int]] | None = None

    @property
    def unmet(self) -> Sequence[int]:
        """See `RankLinks`."""
        return [] if self._met else [0]

    def start(self, mailbox: Mailbox) -> None:
        """See `RankLinks`."""
        if not self._started:
            self._started = True
            self.run(lambda: self._join(mailbox))

    def post(self, at: At, message: bytes) -> None:
        """See `RankLinks`."""
        check_length(message)
        self._say(("post", *at, message))

    def missing(self, at: At) -> Sequence[int]:
        """See `RankLinks`."""
        with self.changed:
            self._here = None
            met = self._met and 0 in self.links
        if not met:
            return [] if self.settled(at) else [0]
        self.say(("ask", *at), 0)
        self.wait_for(lambda: self.settled(at) or self._answer(at) is not None or 0 in self.lost, _ASK_S)
        here = self._answer(at)
        if here is not None and len(here) == self._world_size:  # rank 0 is about to tell
            self.wait_for(lambda: self.settled(at) or 0 in self.lost, _ASK_S)
            here = None
        if self.settled(at):
            return []
        return [0] if here is None else [rank for rank in range(self._world_size) if rank not in here]

    def give_over(self, call: int, absent: Sequence[int]) -> None:
        """See `RankLinks`."""
        self.end(call, absent)
        self._say(("over", call, list(absent)))

    def heard(self, rank: int, frame: Frame) -> None:
        """See `RankLinks`."""
        with self.changed:
            match frame:
                case ("all", int(call), int(step), tuple(messages)):
                    there, before = self._whole
                    self._whole = ((call, step), [*(before if there == (call, step) else ()), *messages])
                case ("late", int(call), int(step)):
                    self._late = (call, step)
                case ("here", int(call), int(step), tuple(ranks)):
                    self._here = ((call, step), ranks)
                case ("over", int(call), tuple(absent)):
                    self.end(call, absent)
                case ("lost", int(other)):
                    self.lose(other)
                case ("left", int(other)):
                    self.leave(other)
                case _:
                    raise ProtocolError("rank 0 sent an unknown frame")
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """See `RankLinks`. Without rank 0 nothing comes from anybody."""
        super().leave(rank)
        if not rank:
            self.fail(RankError("trainer rank 0 closed its session", [0]))

    def _answer(self, at: At) -> Sequence[int] | None:
        with self.changed:
            return self._here[1] if self._here is not None and self._here[0] == at else None

    def _say(self, frame: Frame) -> None:
        with self.changed:
            if not self._met:
                self._unsent.append(frame)
                return
        self.say(frame, 0)

    def _join(self, mailbox: Mailbox) -> None:
        """Find rank 0 as soon as it is there, then listen to it. Runs on a thread of its own."""
        try:
            link = self._find(mailbox)
        except RuntimeError as error:
            self.fail(TransportError(f"rank {self._rank}: the store that connects the trainer ranks is gone: {error}"))
            return
        if link is None:
            return
        self.meet(0, link)
        while self._unsaid():
            self.say(self._unsent.pop(0), 0)
        if self.closed:
            self.part(0)
        while self.links:
            self.listen()

    def _unsaid(self) -> bool:
        """Whether something was posted before there was a link; if not, posts go over the link from now on."""
        with self.changed:
            self._met = not self._unsent
            return not self._met

    def _find(self, mailbox: Mailbox) -> Link | None:
        """None if this rank has closed meanwhile."""
        pause_s = _FIRST_LOOK_S
        while not self.closed:
            ticket = mailbox.get(DOOR)
            if isinstance(ticket, Ticket):
                try:
                    return self._connect(ticket)
                except WsyncError as error:
                    self.obstacle = str(error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        return None

    def _connect(self, ticket: Ticket) -> Link:
        host, port = address_parts(ticket.address)
        at = f"[{store_address(self._store)[0]}]:{port}" if ipaddress.ip_address(host).is_unspecified else None
        deadline = Deadline.after(_CONNECT_S)
        peer, longest = "trainer rank 0", MAX_FRAME_BYTES
        return connect(ticket, self._rank, deadline, at=at, peer=peer, max_bytes=longest)[0]
