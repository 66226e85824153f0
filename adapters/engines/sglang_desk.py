"""Where the workers of an SGLang engine come for one control frame each, and bring their answers.

SGLang's remote procedure call tells its caller how one rank fared. So each call opens a socket with a random abstract
name, has SGLang call every rank with that name (it *rings*), and then every rank speaks for itself. Nothing needs to be
secret: the kernel says which process is on the other end, and only processes of this engine are served.
"""

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait

from wsync.background import Background
from wsync.deadline import Deadline
from wsync.errors import PeerError, ProtocolError, SyncTimeout, TransportError, WsyncError
from wsync.transports.link import credentials
from wsync.wire import FrameReader, send_frame

_BRIEFLY_S = 10.0
"""For a request that a worker is reading at that moment."""


class Desk:
    """One call. Use it as a context manager.

    Attributes:
        address: abstract name of the socket.
    """

    def __init__(self, request: tuple[str, bytes, str], workers: int, lifelines: Mapping[int, int]) -> None:
        """Args:
        request: what every worker is asked: method, payload, checkpoint folder.
        workers: how many of them come.
        lifelines: what becomes readable when a process ends -> its id, for the processes of the engine.
        """
        self.address = f"wsync-{secrets.token_hex(16)}"
        self._request, self._workers, self._lifelines = request, workers, lifelines
        self._visitors: dict[socket.socket, FrameReader] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._answers: dict[int, bytes] = {}
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        try:
            self._sock.bind(f"\0{self.address}")
            self._sock.listen(workers + 16)
        except OSError as error:
            self._sock.close()
            raise TransportError(f"cannot listen on an abstract Unix socket: {error}") from error

    def __enter__(self) -> "Desk":
        return self

    def __exit__(self, *reason: object) -> None:
        self._sock.close()
        for visitor in self._visitors:
            visitor.close()

    def serve(self, ring: Background[None], timeout_s: float | None) -> list[bytes]:
        """Answers in rank order, as soon as all are here and `ring` has ended.

        Raises `PeerError` if a process of the engine ends or a worker stays away, `SyncTimeout`, and as `ring`.
        """
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        rung, at_end = socket.socketpair()
        ring.add_done_callback(at_end.close)
        with rung:
            while len(self._answers) < self._workers or not ring.done:
                left_s = None if deadline is None else deadline.remaining(ring.name)
                bell = [] if ring.done else [rung]
                ready = wait([self._sock, *self._visitors, *bell, *self._lifelines], 0.0 if ring.done else left_s)
                self._step(ready)
                if not ready and ring.done:
                    break  # SGLang says that every rank is through: nobody else comes
                if not ready and deadline is not None:
                    raise SyncTimeout(f"gave up after {deadline.timeout_s:g} s: still waiting for {ring.name}")
        ring.result(Deadline.after(_BRIEFLY_S))
        if absent := sorted(set(range(self._workers)) - self._answers.keys()):
            raise PeerError(f"worker(s) {absent} gave no answer, while waiting for {ring.name}")
        return [self._answers[rank] for rank in range(self._workers)]

    def _step(self, ready: Sequence[object]) -> None:
        for visitor in list(self._visitors):
            if visitor in ready:
                self._hear(visitor)
        if self._sock in ready:
            self._let_in()
        if ended := [pid for lifeline, pid in self._lifelines.items() if lifeline in ready]:
            raise PeerError(f"its process {ended[0]} ended")

    def _let_in(self) -> None:
        visitor, _ = self._sock.accept()
        pid, user = credentials(visitor)
        if user != os.geteuid() or pid not in self._lifelines.values():
            visitor.close()
            return
        visitor.setblocking(False)
        self._visitors[visitor] = FrameReader(visitor, peer=f"process {pid}")

    def _hear(self, visitor: socket.socket) -> None:
        """Take what a worker says. One that breaks off says no more; the ring tells why."""
        try:
            frame = self._visitors[visitor].step()
            if frame is None:
                return
            match frame[0]:
                case ("here", int(rank)) if visitor not in self._ranks and 0 <= rank < self._workers:
                    self._ranks[visitor] = rank
                    send_frame(visitor, self._request, Deadline.after(_BRIEFLY_S), peer=f"worker {rank}")
                    return
                case bytes(answer) if visitor in self._ranks:
                    self._answers[self._ranks[visitor]] = answer
                case _:
                    raise ProtocolError("it does not speak as a worker does")
        except WsyncError:
            pass
        del self._visitors[visitor]
        visitor.close()
