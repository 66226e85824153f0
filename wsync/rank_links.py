"""Links between trainer rank 0 and every other rank: what they post for each other, and who of them is gone.

    rank r                                 rank 0
      | -- post(call, step, message) ------> |    kept until everybody's is here
      | <- all(call, step, messages) ------- |    by rank; as many frames as it takes
      | <- late(call, step) ---------------- |    instead: that call is over
      | -- ask(call, step) ----------------> |
      | <- here(call, step, ranks) --------- |    who has posted
      | -- over(call) ---------------------> |    it began without somebody, who is to skip it
      | <- over(call) ---------------------- |
      | <- lost(rank) ---------------------- |
      | -- bye ------- or ------- bye ------ |    a group that is closed is no death

The store of the trainer's ranks only tells where rank 0 listens, and the secret.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from torch.distributed.distributed_c10d import Store

from wsync.deadline import FOREVER_S, Deadline
from wsync.errors import PeerError, ProtocolError, WsyncError
from wsync.transports.link import Link, wait_any
from wsync.wire import MAX_FRAME_BYTES

At = tuple[int, int]
"""A step of a call."""

Frame = tuple[object, ...]

NEVER: At = (-1, 0)
"""Before the first step of the first call, which is 0."""

DOOR = "door"
"""Where the store tells of rank 0."""

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - 1024
SEND_S = 10.0
_BYE_S = 1.0


class RankLinks(Protocol):
    """One rank's end.

    Attributes:
        lost: ranks whose process ended without closing its group, or whose host cannot be reached any more.
        over: the last call that somebody gave up before all had begun it, -1 if there is none.
        trouble: why rank 0 cannot be reached, "" as long as it may be.
    """

    lost: list[int]
    over: int
    trouble: str

    def start(self, store: Store) -> None:
        """Meet the others, in the background. Raises `TransportError` if rank 0 has no address for them."""
        ...

    def post(self, at: At, message: bytes) -> None:
        """Tell everybody, as soon as all have posted theirs. Raises `ProtocolError` if it is too long."""
        ...

    def take(self, at: At) -> Sequence[bytes] | None:
        """Everybody's message, by rank, once all are here."""
        ...

    def late(self, at: At) -> bool:
        """Whether this rank began a call that was over."""
        ...

    def settled(self, at: At) -> bool:
        """Whether there is nothing to wait for any more."""
        ...

    def missing(self, at: At) -> Sequence[int]:
        """Ranks that have not posted, as rank 0 knows; rank 0 itself if it does not say. Empty if `settled`."""
        ...

    def give_over(self, call: int) -> None:
        """Nobody is to begin this call any more."""
        ...

    def delivered(self) -> bool:
        """Whether what was posted here is on its way."""
        ...

    def wait(self, done: Callable[[], bool], timeout_s: float, known: int = 0) -> bool:
        """Wait until `done()` or more than `known` ranks are lost; False after `timeout_s`. See `notify`."""
        ...

    def notify(self) -> None:
        """Let `wait` look again: what `done` says may have changed."""
        ...

    def close(self) -> None:
        """Say good-bye, so that nobody takes it for a death, and hang up. Never raises."""
        ...


class Ends:
    """What both ends have in common: links by rank, a thread that listens to them, and who is lost.

    `changed` guards every attribute; frames go out without it.
    """

    def __init__(self, world_size: int) -> None:
        """Local; nothing is connected."""
        self.changed = threading.Condition()
        self.lost: list[int] = []
        self.over = -1
        self.trouble = ""
        self.links: dict[int, Link] = {}
        self.closed = self.hung_up = False
        self._world_size = world_size
        self._whole: tuple[At, list[bytes]] = (NEVER, [])
        self._late: At | None = None

    def take(self, at: At) -> Sequence[bytes] | None:
        """See `RankLinks`."""
        with self.changed:
            there, messages = self._whole
            return messages if there == at and len(messages) == self._world_size else None

    def late(self, at: At) -> bool:
        """See `RankLinks`."""
        return self._late == at

    def settled(self, at: At) -> bool:
        """See `RankLinks`."""
        return self.late(at) or bool(self.trouble) or self.take(at) is not None

    def wait(self, done: Callable[[], bool], timeout_s: float, known: int = 0) -> bool:
        """See `RankLinks`."""
        with self.changed:
            return self.changed.wait_for(lambda: done() or len(self.lost) > known, timeout_s)

    def notify(self) -> None:
        """See `RankLinks`."""
        with self.changed:
            self.changed.notify_all()

    def hang_up(self) -> None:
        """Say good-bye and end the thread that listens. Never raises."""
        with self.changed:
            self.hung_up = True
            links = list(self.links.values())
        for link in links:
            with suppress(WsyncError):
                link.send(("bye",), Deadline.after(_BYE_S))
            link.shutdown()

    def run(self, body: Callable[[], None]) -> None:
        """On a thread of its own."""
        threading.Thread(target=body, name="wsync trainer ranks", daemon=True).start()

    def listen(self, filenos: Sequence[int] = ()) -> None:
        """Wait until a link, or one of `filenos`, has something to say; take in what links say."""
        links = list(self.links.values())
        wait_any([*filenos, *(fd for link in links for fd in link.filenos())], Deadline.after(FOREVER_S), "ranks")
        for rank in list(self.links):
            self._hear(rank)

    def leave(self) -> None:
        """When nobody listens any more: close the links."""
        while self.links:
            _, link = self.links.popitem()
            with suppress(WsyncError):  # one that came while this side was closing has heard no good-bye yet
                link.send(("bye",), Deadline.after(_BYE_S))
            link.close()

    def heard(self, rank: int, frame: Frame) -> None:
        """Take a frame in. Raises `ProtocolError` if it is none that `rank` sends."""
        raise NotImplementedError

    def lose(self, rank: int) -> None:
        """That rank is gone."""
        with self.changed:
            if rank not in self.lost:
                self.lost.append(rank)
            self.changed.notify_all()

    def _hear(self, rank: int) -> None:
        try:
            while (frame := self.links[rank].receive()) is not None:
                if frame == ("bye",):
                    self._drop(rank)
                    return
                self.heard(rank, frame)
        except (PeerError, ProtocolError):
            self._drop(rank)
            if not self.closed:
                self.lose(rank)

    def _drop(self, rank: int) -> None:
        with self.changed:
            link = self.links.pop(rank)
        link.close()


def check_length(message: bytes) -> None:
    """Raises `ProtocolError` if it does not fit a frame."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(message)} bytes is longer than the bound of {MAX_MESSAGE_BYTES} bytes")
