"""One blocking call at a time on a thread that never keeps the process alive."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import cache
from typing import Generic, TypeVar

from wsync.deadline import Deadline
from wsync.errors import SyncTimeout

T = TypeVar("T")

_EXIT_S = 5.0
"""Longest that calls which still run may delay the end of the process, in seconds, all together."""


class Background(Generic[T]):
    """A call that runs while the caller goes on.

    The thread is a daemon: a peer that never answers cannot delay the caller, who has a deadline, and hardly the end of
    the process. A little it must: a thread that is in the middle of C++ when Python ends aborts the process.
    """

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        """Start `call` at once. `name` says what it is, for messages."""
        self.name = name
        self._future: Future[T] = Future()
        thread = threading.Thread(target=self._run, args=(call,), name=f"wsync {name}", daemon=True)
        _threads().add(thread)
        thread.start()

    @property
    def done(self) -> bool:
        """True if the call has returned or raised."""
        return self._future.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Run `callback` when the call ends, on its thread (or now, if it has ended)."""
        self._future.add_done_callback(lambda _: callback())

    def result(self, deadline: Deadline) -> T:
        """What the call returned. Raises what it raised, or `SyncTimeout` at `deadline`; the call then runs on."""
        try:
            return self._future.result(timeout=deadline.remaining(self.name))
        except FutureTimeout:
            if self._future.done():
                return self._future.result()  # it ended just now, or this error is its own
            raise SyncTimeout(f"gave up after {deadline.timeout_s:g} s: still waiting for {self.name}") from None

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:  # handed to whoever asks for the result
            self._future.set_exception(error)


@cache
def _threads() -> "weakref.WeakSet[threading.Thread]":
    """Every thread that runs a call; they are waited for at exit."""
    threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
    atexit.register(_join, threads)
    return threads


def _join(threads: "weakref.WeakSet[threading.Thread]") -> None:
    expires = time.monotonic() + _EXIT_S
    for thread in list(threads):
        thread.join(max(0.0, expires - time.monotonic()))
