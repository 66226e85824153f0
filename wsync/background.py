"""One blocking call at a time on a thread that never keeps the process alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Generic, TypeVar

from wsync.deadline import Deadline
from wsync.errors import SyncTimeout

T = TypeVar("T")


class Background(Generic[T]):
    """A call that runs while the caller goes on.

    The thread is a daemon: a peer that never answers can delay neither the caller, who has a deadline, nor the end
    of the process.
    """

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        """Start `call` at once. `name` says what it is, for messages."""
        self.name = name
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, args=(call,), name=f"wsync {name}", daemon=True).start()

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
