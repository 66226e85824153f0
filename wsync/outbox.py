"""What goes out over a link while nobody waits for the other side to take it."""

import threading
from collections import deque

from wsync.background import Background
from wsync.deadline import Deadline
from wsync.errors import WsyncError
from wsync.transports.link import Link

_SEND_S = 10.0
"""How long the other side may take nothing: then its link is hung up, as half a frame is of no use."""


class Outbox:
    """Frames for one link, in order. What its socket does not take at once goes out on a thread of its own.

    May be called from any thread. What goes wrong ends the link, which whoever listens to it hears; nothing raises.
    """

    def __init__(self, link: Link) -> None:
        """Nobody else sends over `link`."""
        self._link = link
        self._lock = threading.RLock()
        self._rest: deque[memoryview] = deque()
        self._ending = False

    def put(self, frame: bytes) -> None:
        """Send `frame`, as `wsync.wire.frame_of` makes it, after what was put before. Does not wait."""
        with self._lock:
            self._rest.append(memoryview(frame))
            if len(self._rest) == 1 and not self._flush():
                Background(f"{self._link.peer} to take a message", self._go_on)

    def hang_up(self) -> None:
        """End the link as soon as all of it is out. Does not wait."""
        with self._lock:
            self._ending = True
            if not self._rest:
                self._link.shutdown()

    def _flush(self) -> bool:
        """Send what the socket takes now. Whether nothing is left to send. Call with the lock held."""
        try:
            while self._rest:
                self._rest[0] = self._link.offer(self._rest[0])
                if self._rest[0]:
                    return False
                self._rest.popleft()
        except WsyncError:
            self._end()
        return True

    def _go_on(self) -> None:
        while True:
            try:
                self._link.wait_writable(Deadline.after(_SEND_S))
            except (WsyncError, OSError, ValueError):  # the others: it was closed just now
                self._end()
                return
            with self._lock:
                if self._flush():
                    if self._ending:
                        self._link.shutdown()
                    return

    def _end(self) -> None:
        with self._lock:
            self._rest.clear()
            self._link.shutdown()
