"""Links between trainer rank 0 and every other rank: what they post for each other, and who of them is gone.

    rank r                                 rank 0
      | -- post(call, step, message) ------> |    kept until everybody's is here
      | <- all(call, step, messages) ------- |    by rank; as many frames as it takes
      | -- ask(call, step) ----------------> |
      | <- here(call, step, ranks) --------- |    who has posted
      | -- over(call, absent) -------------> |    it began without them; nobody waits for them any more
      | <- over(call, absent) -------------- |
      | <- late(call, step) ---------------- |    to whoever begins a call that is over
      | <- lost(rank) ---------------------- |    its process ended, or its host cannot be reached
      | <- left(rank) ---------------------- |    it closed its group
      | -- bye ------- or ------- bye ------ |    a group that is closed is no death

Where rank 0 listens, and the secret, lie in the mailbox.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from wsync.deadline import FOREVER_S, Deadline
from wsync.errors import PeerError, ProtocolError, WsyncError
from wsync.mailbox import Mailbox
from wsync.outbox import Outbox
from wsync.transports.link import Link, wait_any
from wsync.wire import MAX_FRAME_BYTES, frame_of

At = tuple[int, int]
"""A step of a call."""

Frame = tuple[object, ...]

NEVER: At = (-1, 0)
"""Before the first step of the first call, which is 0."""

DOOR = "door"
"""Where the mailbox tells of rank 0."""

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - 1024


class RankLinks(ABC):
    """One rank's end: links by rank, a thread that listens to them, and who is lost.

    State changes with `changed` held, and frames go out without it.

    Attributes:
        lost: ranks whose process ended without closing its group, or whose host cannot be reached any more.
        left: ranks that closed their group.
        over: the last call that somebody gave up before all had begun it, -1 if there is none.
        trouble: why nothing will come any more, None as long as it may.
        obstacle: why rank 0 could not be reached so far, "" if nothing is known.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        """Local; nothing is connected."""
        self.changed = threading.Condition()
        self.lost: list[int] = []
        self.left: list[int] = []
        self.over = NEVER[0]
        self.trouble: WsyncError | None = None
        self.obstacle = ""
        self.links: dict[int, Link] = {}
        self._outboxes: dict[int, Outbox] = {}
        self.closed = False
        self._rank, self._world_size = rank, world_size
        self._whole: tuple[At, list[bytes]] = (NEVER, [])
        self._late: At | None = None
        self._absent: tuple[int, Sequence[int]] = (NEVER[0], ())

    # What a round does.

    @abstractmethod
    def start(self, mailbox: Mailbox) -> None:
        """Meet the others, in the background. Raises `TransportError` if rank 0 has no address for them."""

    @property
    @abstractmethod
    def unmet(self) -> Sequence[int]:
        """Ranks with which this one has had no link yet."""

    @abstractmethod
    def post(self, at: At, message: bytes) -> None:
        """Tell everybody, as soon as all have posted theirs. Raises `ProtocolError` if it is too long."""

    def take(self, at: At) -> Sequence[bytes] | None:
        """Everybody's message, by rank, once all are here."""
        with self.changed:
            there, messages = self._whole
            return messages if there == at and len(messages) == self._world_size else None

    def late(self, at: At) -> bool:
        """Whether this rank is in the first step of a call that is over, and not for want of others."""
        return self._late == at or (not at[1] and at[0] <= self.over and not self.absent(at))

    def absent(self, at: At) -> Sequence[int]:
        """Ranks without which this was given over, while this rank waits for them."""
        with self.changed:
            call, ranks = self._absent
            return ranks if at == (call, 0) else ()

    def settled(self, at: At) -> bool:
        """Whether there is nothing to wait for any more."""
        return self.take(at) is not None or bool(self.trouble or self.absent(at)) or self.late(at)

    @abstractmethod
    def missing(self, at: At) -> Sequence[int]:
        """Ranks that have not posted, as rank 0 knows; rank 0 itself if it does not say. Empty if `settled`."""

    @abstractmethod
    def give_over(self, call: int, absent: Sequence[int]) -> None:
        """Nobody is to begin this call any more."""

    @property
    def gone(self) -> set[int]:
        """Ranks that are lost or have left: nothing comes from them."""
        return {*self.lost, *self.left}

    def wait_for(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `done()`; False after `timeout_s`. See `notify`."""
        with self.changed:
            return self.changed.wait_for(done, timeout_s)

    def notify(self) -> None:
        """Let `wait_for` look again: what `done` says may have changed."""
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """Say good-bye, so that nobody takes it for a death, and hang up. Never raises.

        The thread that listens hears the links end, and closes them.
        """
        with self.changed:
            self.closed = True
            ranks = list(self.links)
        for rank in ranks:
            self.part(rank)

    def say(self, frame: Frame, *ranks: int) -> None:
        """Send it to those of `ranks` that have a link. Does not wait until they take it. Never raises."""
        data = frame_of(frame)
        for rank in ranks:
            if outbox := self._outboxes.get(rank):
                outbox.put(data)

    def part(self, rank: int) -> None:
        """Say good-bye and hang up. Never raises."""
        self.say(("bye",), rank)
        if outbox := self._outboxes.get(rank):
            outbox.hang_up()

    # What the thread that listens does.

    def meet(self, rank: int, link: Link) -> None:
        """That rank is here."""
        with self.changed:
            self.links[rank], self._outboxes[rank] = link, Outbox(link)

    def run(self, body: Callable[[], None]) -> None:
        """On a thread of its own."""
        threading.Thread(target=body, name="wsync trainer ranks", daemon=True).start()

    def listen(self, filenos: Sequence[int] = (), timeout_s: float = FOREVER_S) -> None:
        """Wait until a link or one of `filenos` has something to say; take in what links say. Raises `SyncTimeout`."""
        links = list(self.links.values())
        wait_any([*filenos, *(fd for link in links for fd in link.filenos())], Deadline.after(timeout_s), "ranks")
        for rank in list(self.links):
            self._hear(rank)

    @abstractmethod
    def heard(self, rank: int, frame: Frame) -> None:
        """Take a frame in. Raises `ProtocolError` if it is none that `rank` sends."""

    def lose(self, rank: int) -> None:
        """That rank is gone."""
        with self.changed:
            if rank not in self.lost:
                self.lost.append(rank)
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """That rank closed its group."""
        with self.changed:
            self.left.append(rank)
            self.changed.notify_all()

    def fail(self, error: WsyncError) -> None:
        """Nothing will come any more."""
        with self.changed:
            self.trouble = error
            self.changed.notify_all()

    def end(self, call: int, absent: Sequence[int]) -> None:
        """Somebody gave `call` over."""
        with self.changed:
            self.over = max(self.over, call)
            if self._rank not in absent:
                self._absent = (call, absent)
            self.changed.notify_all()

    def _hear(self, rank: int) -> None:
        try:
            while (frame := self.links[rank].receive()) is not None:
                if frame == ("bye",):
                    self._drop(rank)
                    self.leave(rank)
                    return
                self.heard(rank, frame)
        except (PeerError, ProtocolError):
            self._drop(rank)
            if not self.closed:
                self.lose(rank)

    def _drop(self, rank: int) -> None:
        with self.changed:
            link = self.links.pop(rank)
            del self._outboxes[rank]
        link.shutdown()  # wakes whoever still waits to send
        link.close()


def check_length(message: bytes) -> None:
    """Raises `ProtocolError` if it does not fit a frame."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(message)} bytes is longer than the bound of {MAX_MESSAGE_BYTES} bytes")
