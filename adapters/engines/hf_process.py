"""A worker process of ours that has a model to itself, and this process's end of the one socket that controls it.

    request  {"id": n, "op": name, "args": {...}}          id None: no answer is wanted
    answer   {"id": n, "ok": value} | {"id": n, "error": {"type", "message", "traceback"}}

Answers come in any order, so that a generation can run while it is told to stop. The socket is unnamed and inherited:
nobody else can connect, and the end of either process is the end of file of the other.
"""

import itertools
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch

from wsync import wire
from wsync.deadline import FOREVER_S, Deadline
from wsync.errors import ClosedError, PeerError, ProtocolError, SyncTimeout, UnsupportedError, WsyncError
from wsync.transports.link import not_for_children

_EXIT_TIMEOUT_S = 10.0


class WorkerProcess:
    """Starts `hf_worker` and answers like a `LocalModel`. The process ends with this object, at the latest."""

    def __init__(self, folder: Path, *, dtype: torch.dtype | None, device: str, timeout_s: float) -> None:
        """Returns when the model is loaded. Raises `PeerError` or `SyncTimeout`; then the process is gone."""
        self._timeout_s = timeout_s
        self._channel = _Channel()
        weakref.finalize(self, self._channel.end)
        try:
            args = {"folder": str(folder), "dtype": dtype, "device": device}
            self._channel.ask("load", args, timeout_s)
        except BaseException:
            self.shutdown()
            raise

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._channel.process.pid

    def handle(self, method: str, payload: bytes, timeout_s: float | None) -> bytes:
        """`Worker.handle` over there; `timeout_s` None: as long as it takes."""
        return cast("bytes", self._channel.ask("handle", {"method": method, "payload": payload}, timeout_s))

    def generate(
        self, rows: Sequence[Sequence[int]], max_new_tokens: int, options: Mapping[str, Any], ended: Callable[[], None]
    ) -> list[list[int]]:
        """As `LocalModel.generate`. After `SyncTimeout` it still runs over there, and `ended` comes later."""
        args = {"rows": rows, "max_new_tokens": max_new_tokens, "options": options}
        answer = cast("Sequence[Sequence[int]]", self._channel.ask("generate", args, self._timeout_s, ended))
        return [list(row) for row in answer]

    def stop(self, stopping: bool) -> None:
        """As `LocalModel.stop`; a request that was sent before is covered."""
        self._channel.tell("stop", {"stopping": stopping})

    def guard(self, reason: str | None) -> None:
        """Nothing: the model is reached through its engine only, which refuses by itself."""

    def sleep(self, level: int, timeout_s: float) -> None:
        """As `LocalModel.sleep`, in at most `timeout_s` seconds."""
        self._channel.ask("sleep", {"level": level}, timeout_s)

    def wake_up(self, timeout_s: float) -> None:
        """As `LocalModel.wake_up`, in at most `timeout_s` seconds."""
        self._channel.ask("wake_up", {}, timeout_s)

    def shutdown(self) -> None:
        """End the process, whatever it is doing, and wait until it is gone."""
        self._channel.end()


class _Channel:
    """Process, socket, and requests that wait for their answers."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        not_for_children(self._socket)
        command = [sys.executable, "-m", "wsync.adapters.engines.hf_worker", str(theirs.fileno())]
        with theirs:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self._name = f"the hf worker process {self.process.pid}"
        self._numbers = itertools.count()
        self._outbox: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._state = threading.Lock()
        self._waiting: dict[int | None, Future[object]] = {}
        self._over: Callable[[], WsyncError] | None = None
        self._threads = [
            threading.Thread(target=loop, name=f"wsync {self._name}", daemon=True)
            for loop in (self._receive, self._transmit)
        ]
        for thread in self._threads:
            thread.start()

    def ask(
        self,
        op: str,
        args: Mapping[str, object],
        timeout_s: float | None,
        ended: Callable[[], None] | None = None,
    ) -> object:
        """Send a request and wait for its answer. `ended` is called once no answer can come any more.

        Raises `PeerError` with the remote traceback or the exit code, `SyncTimeout`, `ClosedError`.
        """
        deadline = Deadline.after(FOREVER_S if timeout_s is None else timeout_s)
        number, future = next(self._numbers), Future[object]()
        if ended is not None:
            future.add_done_callback(lambda _: ended())
        with self._state:
            over = self._over
            if over is None:
                self._waiting[number] = future
        if over is not None:
            future.cancel()
            raise over()
        self._outbox.put({"id": number, "op": op, "args": args})
        waiting_for = f"{self._name} to answer {op!r}"
        try:
            return future.result(timeout=deadline.remaining(waiting_for))
        except FutureTimeout:
            if future.done():
                return future.result()  # it came just now, or this error is the answer
            raise SyncTimeout(f"gave up after {deadline.timeout_s:g} s: still waiting for {waiting_for}") from None

    def tell(self, op: str, args: Mapping[str, object]) -> None:
        """Send a request without an answer. A worker that is gone needs no telling."""
        self._outbox.put({"id": None, "op": op, "args": args})

    def end(self) -> None:
        """Kill the process and wait until it and both threads are gone. May be called twice."""
        with self._state:
            if self._over is None:
                self._over = lambda: ClosedError(f"{self._name} was shut down")
        self.process.kill()
        self.process.wait()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():  # which collects garbage, maybe
                thread.join(_EXIT_TIMEOUT_S)

    def _transmit(self) -> None:
        """Send requests in order. On a thread of its own: a stalled worker makes nobody wait beyond his deadline."""
        while (message := self._outbox.get()) is not None:
            try:
                wire.send_frame(self._socket, message, Deadline.after(FOREVER_S), peer=self._name)
            except (UnsupportedError, ProtocolError) as error:  # nothing of it is out
                self._settle(message["id"], error=error)
            except WsyncError:
                return  # the receiving thread finds out how it ended

    def _receive(self) -> None:
        """Hand out answers until there are no more. Runs on a thread of its own."""
        try:
            while True:
                answer, _ = wire.recv_frame(self._socket, Deadline.after(FOREVER_S), peer=self._name)
                self._open(cast("Mapping[str, Any]", answer))
        except Exception as error:
            self._lose(error)
        finally:
            self._outbox.put(None)
            self._socket.close()

    def _open(self, answer: Mapping[str, Any]) -> None:
        if "error" not in answer:
            self._settle(answer["id"], answer["ok"])
            return
        error = answer["error"]
        message = f"{self._name} failed: {error['type']}: {error['message']}"
        self._settle(answer["id"], error=PeerError(message, error["traceback"]))

    def _settle(self, number: int | None, result: object = None, error: WsyncError | None = None) -> None:
        with self._state:
            future = self._waiting.pop(number, None)
        if future is not None and error is not None:
            future.set_exception(error)
        elif future is not None:
            future.set_result(result)

    def _lose(self, error: Exception) -> None:
        if not isinstance(error, PeerError):
            self.process.kill()  # it speaks nonsense
        try:
            code = self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = "" if isinstance(error, PeerError) else f" ({error})"
        with self._state:
            if self._over is None:
                self._over = lambda: PeerError(f"{self._name} {how}{reason}; launch the engine again")
            over, futures = self._over, list(self._waiting.values())
            self._waiting.clear()
        for future in futures:
            future.set_exception(over())
