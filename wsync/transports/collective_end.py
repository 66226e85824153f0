"""What sender and receiver of a collective share: two threads, one that listens and one that broadcasts."""

import threading
from collections.abc import Callable, Sequence

import torch

from wsync.deadline import FOREVER_S, Deadline
from wsync.transports.collective_group import Mover
from wsync.transports.link import Link, wait_any

FRAME_TIMEOUT_S = 10.0
_LEAVE_S = 2.0
"""How long, in seconds, a thread that may be stuck in the backend is waited for; and how long the backend's error
waits for the reason, which comes over the link."""


class End:
    """What both ends share. Threads hold this, not the object that its user holds.

    `changed` guards every attribute; frames go out without it.
    """

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        self.changed = threading.Condition()
        self.slots = slots
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

    def fail(self, error: Exception) -> None:
        """The backend gave up. The reason, a peer that died say, is a matter of moments."""
        with self.changed:
            self.changed.wait_for(self.heard, _LEAVE_S)
            self.broken = self.broken or f"the transfer broke: {error}"
            self.changed.notify_all()

    def leave(self, links: Sequence[Link]) -> None:
        """End the threads, as far as they can be ended, and release everything."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for link in links:
            link.shutdown()
        if self.listener is not None:
            self.listener.join(_LEAVE_S)
        if self.mover is not None:
            self.mover.stop(_LEAVE_S)
        for link in links:
            link.close()
        self.slots = ()
