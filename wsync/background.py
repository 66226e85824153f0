"""One blocking call at a time on a thread that never keeps the process alive."""

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from wsync.deadline import Deadline
from wsync.errors import SyncTimeout

T = TypeVar("T")

_EXIT_S = 5.0
"""Longest that calls which still run may delay the end of the process, in seconds, all together."""

_MOST_IDLE = 2
"""Threads that are kept for the next calls. One that starts delays its first call by more than a quick call takes."""


class Background(Generic[T]):
    """A call that runs while the caller goes on.

    The thread is a daemon: a peer that never answers cannot delay the caller, who has a deadline, and hardly the end of
    the process. A little it must: a thread that is in the middle of C++ when Python ends aborts the process.
    """

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        """Start `call` at once. `name` says what it is, for messages."""
        self.name = name
        self._future: Future[T] = Future()
        _threads().start(f"wsync {name}", call, self._future)

    @property
    def done(self) -> bool:
        """True if the call has returned or raised."""
        return self._future.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Run `callback` when the call ends, on its thread (or now, if it has ended)."""
        self._future.add_done_callback(lambda _: callback())

    def result(self, deadline: Deadline) -> T:
        """What the call returned. Raises what it raised, or `SyncTimeout` at `deadline`; the call then runs on."""
        future, name = self._future, self.name
        try:
            return future.result(timeout=deadline.remaining(name))
        except FutureTimeout:
            if future.done():
                return future.result()  # it ended just now, or this error is its own
            raise SyncTimeout(f"gave up after {deadline.timeout_s:g} s: still waiting for {name}") from None
        finally:
            del future, self  # the traceback of an error, which the future holds, leads to this frame


def num_busy_threads() -> int:
    """Threads of this process, without those that wait here for another call."""
    return sum(not (isinstance(thread, _Thread) and thread.waits) for thread in threading.enumerate())


class _Threads:
    """Threads that run calls, each for one at a time, and a few that wait for the next."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # whoever collects garbage in here may start a call
        self._idle: list[_Thread] = []
        self._running: set[Future[object]] = set()

    def start(self, name: str, call: Callable[[], T], future: "Future[T]") -> None:
        """Run `call` at once, and put what comes of it into `future`."""
        with self._lock:
            thread = None
            with suppress(IndexError):
                thread = self._idle.pop()
                thread.waits = False
            self._running.add(future)  # type: ignore[arg-type]
        fresh = thread is None
        thread = thread or _Thread()
        thread.name = name
        thread.tasks.put(partial(self._run, thread, call, future))  # no frame of its own, which would keep them
        if fresh:
            try:
                thread.start()
            except BaseException:  # no more threads: nobody shall wait for it at exit
                self._end(future)
                raise

    def wait(self, timeout_s: float) -> None:
        """Until no call runs, or for so long."""
        with self._lock:
            running = list(self._running)
        wait(running, timeout_s)

    def _run(self, thread: "_Thread", call: Callable[[], T], future: "Future[T]") -> bool:
        """Whether `thread` is to wait for another call."""
        try:
            with torch.enable_grad():  # as on a fresh thread, whatever the call before has left
                result, error = call(), None
        except BaseException as caught:  # handed to whoever asks for the result
            result, error = None, caught
        self._end(future)
        try:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]
        finally:
            del call, future, result, error  # its traceback leads to this frame
        with self._lock:  # callbacks have run: until then the thread is not free
            kept = thread.waits = len(self._idle) < _MOST_IDLE
            if kept:
                self._idle.append(thread)
        return kept

    def _end(self, future: Future[Any]) -> None:
        with self._lock:
            self._running.discard(future)


class _Thread(threading.Thread):
    """Runs what is put into `tasks`, until one of them says that it was the last."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.tasks: SimpleQueue[Callable[[], bool]] = SimpleQueue()
        self.waits = False

    def run(self) -> None:
        """See `threading.Thread`."""
        while self.tasks.get()():
            self.name = "wsync idle"


@cache
def _threads() -> _Threads:
    """Those of this process. A forked child has none of them, and begins with others."""
    threads = _Threads()
    pid = os.getpid()
    atexit.register(lambda: threads.wait(_EXIT_S) if os.getpid() == pid else None)
    os.register_at_fork(after_in_child=_threads.cache_clear)
    return threads
