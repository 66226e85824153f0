"""What sender and receiver of a collective share: two threads, one that listens and one that broadcasts."""

import threading
from collections.abc import Callable, Sequence

from wsync.deadline import FOREVER_S, Deadline
from wsync.transports.collective_group import LEAVE_S, Mover
from wsync.transports.link import Link, wait_any
from wsync.transports.slots import SlotMemory

FRAME_TIMEOUT_S = 10.0


class End:
    """What both ends share. Threads hold this, not the object that its user holds.

    `changed` guards every attribute; frames go out without it.

    Attributes:
        begun: broadcasts after which work may be queued.
        moved: broadcasts that are through, as far as this end has a part in them.
    """

    def __init__(self, memory: SlotMemory) -> None:
        self.changed = threading.Condition()
        self.memory = memory
        self.begun = 0
        self.moved = 0
        self.closed = False
        self.broken = ""
        self.mover: Mover | None = None
        self.listener: threading.Thread | None = None

    def listen(self, links: Callable[[], Sequence[Link]], hear: Callable[[], None]) -> None:
        """On a thread of its own: call `hear` whenever one of `links` has something to say, until there are none."""

        def run() -> None:
            while open_links := links():
                wait_any([fd for link in open_links for fd in link.filenos()], Deadline.after(FOREVER_S), "frames")
                hear()

        self.listener = threading.Thread(target=run, name="wsync collective", daemon=True)
        self.listener.start()

    def heard(self) -> bool:
        """Whether the link has told why the backend fails. Call with `changed` held."""
        return self.closed

    def begin(self, number: int) -> None:
        """Broadcast `number` has begun."""
        with self.changed:
            self.begun = number + 1
            self.changed.notify_all()

    def arrive(self, number: int) -> None:
        """Broadcast `number` is through."""
        with self.changed:
            self.moved = number + 1
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """The backend gave up. The reason, a peer that died say, is a matter of moments."""
        with self.changed:
            self.changed.wait_for(self.heard, LEAVE_S)
            self.broken = self.broken or f"the transfer broke: {error}"
            self.changed.notify_all()

    def leave(self, links: Sequence[Link]) -> None:
        """End the threads, as far as they can be ended, and release everything."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for link in links:
            link.shutdown()
        if self.listener not in (None, threading.current_thread()):  # which the garbage collector may run on
            self.listener.join(LEAVE_S)
        if self.mover is not None:
            self.mover.stop(LEAVE_S)
        for link in links:
            link.close()
        self.memory.close()
