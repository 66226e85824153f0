"""Requests and answers over one link: many may be under way, answers come in any order.

    request  ("ask", number, op, args)
    answer   ("ok", number, value) | ("error", number, type, message, traceback)

Errors of wsync's own keep their type on the other side, with the remote traceback as their cause.
"""

import itertools
import threading
import traceback
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from wsync import errors
from wsync.deadline import FOREVER_S, Deadline
from wsync.errors import ClosedError, PeerError, ProtocolError, WsyncError
from wsync.transports.link import Link, wait_any

_KINDS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, WsyncError)}


class Calls:
    """The asking end. Takes over the link; a thread of its own hands the answers out."""

    def __init__(self, link: Link) -> None:
        self.peer = link.peer
        self._link = link
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[object]] = {}
        self._over: WsyncError | None = None
        threading.Thread(target=self._receive, name=f"wsync {self.peer}", daemon=True).start()

    @property
    def over(self) -> bool:
        """Whether the other side is gone, or `close` was called."""
        return self._over is not None

    def ask(self, op: str, args: Mapping[str, object], deadline: Deadline) -> Future[object]:
        """Send a request. Its answer, or `PeerError` if the other side dies, comes through the future."""
        number, future = next(self._numbers), Future[object]()
        with self._lock:
            if self._over is None:
                self._waiting[number] = future
        if self._over is not None:
            raise self._end(self._over)
        try:
            self._link.send(("ask", number, op, dict(args)), deadline)
        except WsyncError as error:
            if isinstance(error, (PeerError, errors.SyncTimeout)):
                self._lose(error)  # part of the frame may be out
            raise
        return future

    def close(self) -> None:
        """Hang up. Whoever waits for an answer gets `ClosedError`."""
        self._lose(ClosedError(f"the connection to {self.peer} was closed on this side"))

    def _receive(self) -> None:
        try:
            while True:
                frame = self._link.receive()
                if frame is None:
                    wait_any(self._link.filenos(), Deadline.after(FOREVER_S), f"answers of {self.peer}")
                else:
                    self._open(frame)
        except Exception as error:
            kept = error if isinstance(error, WsyncError) else PeerError(f"{self.peer}: {error}")
            self._lose(kept)
        finally:
            self._link.close()

    def _open(self, frame: tuple[object, ...]) -> None:
        match frame:
            case ("ok", int(number), value):
                if (future := self._taken(number)) is not None:
                    future.set_result(value)
            case ("error", int(number), str(kind), str(message), str(trace)):
                if (future := self._taken(number)) is not None:
                    future.set_exception(revive(kind, message, trace))
            case _:
                raise ProtocolError(f"{self.peer} sent an unknown frame {str(frame[0])[:20]!r}")

    def _taken(self, number: int) -> "Future[object] | None":
        with self._lock:
            return self._waiting.pop(number, None)

    def _lose(self, error: WsyncError) -> None:
        with self._lock:
            self._over = self._over or error
            futures = list(self._waiting.values())
            self._waiting.clear()
        self._link.shutdown()
        for future in futures:
            future.set_exception(self._end(self._over))

    @staticmethod
    def _end(error: WsyncError) -> WsyncError:
        """A copy: an error that is raised twice would collect the frames of both."""
        return type(error)(*error.args)


def words_of(error: BaseException) -> tuple[str, str, str]:
    """Type, message and traceback of what was raised here, for an answer."""
    remote = getattr(error, "remote_traceback", "")
    trace = remote or "".join(traceback.format_exception(error))
    return type(error).__name__, str(error.args[0]) if remote else str(error), trace


def revive(kind: str, message: str, trace: str) -> WsyncError:
    """The error of `words_of`, on the other side: its own type if it is one of wsync's, else `PeerError`."""
    known = _KINDS.get(kind)
    if known is None:
        return PeerError(f"{kind}: {message}", trace)
    if issubclass(known, PeerError):
        return PeerError(message, trace)
    error: WsyncError = known(message)
    error.__cause__ = PeerError("raised where the engine is", trace)
    return error


def deadline_args(deadline: Deadline, waiting_for: str) -> dict[str, Any]:
    """A deadline as it travels: clocks of two hosts differ, so it is what is left of it."""
    return {"timeout_s": deadline.timeout_s, "left_s": deadline.remaining(waiting_for)}
