"""A connected socket to another process: Unix on one host, TCP between hosts. Linux only.

A peer that dies is heard through its socket, and on one host through a pidfd where a forked child still holds that
socket open. Over TCP a forked child closes it at once. A host that vanishes is missed by TCP itself, after about
`_VANISHED_S` seconds.
"""

import math
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache

from wsync.deadline import Deadline
from wsync.errors import PeerError, ProtocolError
from wsync.wire import FrameReader, offer, send_frame, wait_ready

MAX_BYTES = 1 << 20
"""Longest frame on these sockets, in bytes, unless the caller says more: a failure with its traceback."""

_VANISHED_S = 15
_PROBES = 3
_own: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""Sockets that a forked child of this process has no business with."""

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid


class Link:
    """One socket and the process behind it.

    `send` and `shutdown` may be called from any thread, the rest from one at a time. In the place of `send`, another
    thread may `offer` and `wait_writable`.

    Attributes:
        peer: who is on the other side, for messages.
    """

    def __init__(self, sock: socket.socket, peer: str, max_bytes: int = MAX_BYTES) -> None:
        """Take a connected socket. `max_bytes` bounds the frames that are received."""
        pid = 0
        if sock.family == socket.AF_UNIX:
            pid, _ = credentials(sock)
            self.peer = f"{peer} (pid {pid})"
        else:
            self.peer = f"{peer} at {_keep_alive(sock, peer)}"
            not_for_children(sock)
        self._sock = sock
        self._reader = FrameReader(sock, max_bytes, peer=self.peer)
        self._sending = threading.Lock()
        self._pidfd = _open_pidfd(pid)
        self._pid_here = os.getpid()

    @property
    def host(self) -> str:
        """The address of this end, without its port; for TCP only."""
        return str(self._sock.getsockname()[0])

    def filenos(self) -> list[int]:
        """Descriptors that become readable when there is something to `receive`."""
        return [self._sock.fileno()] + ([] if self._pidfd is None else [self._pidfd])

    def send(self, message: object, deadline: Deadline, fds: Sequence[int] = ()) -> None:
        """Send one frame. Raises `PeerError`, `SyncTimeout`."""
        with self._sending:
            send_frame(self._sock, message, deadline, fds, peer=self.peer)

    def offer(self, data: memoryview) -> memoryview:
        """Send what the socket takes of a frame now, and return the rest. Raises `PeerError`."""
        return offer(self._sock, data, peer=self.peer)

    def wait_writable(self, deadline: Deadline) -> None:
        """Wait until the socket takes something, or its end is heard. Raises `SyncTimeout`, `ClosedError`."""
        wait_ready(self._sock, select.POLLOUT, deadline, f"{self.peer} to take a message")

    def receive(self) -> tuple[object, ...] | None:
        """The next frame, None if none is here. Raises `PeerError` once the peer is gone and all it sent was read."""
        frame = self._reader.step()
        if frame is None and self._pidfd is not None and ready([self._pidfd], 0):
            frame = self._reader.step()  # what it sent between the look at the socket and its death
            if frame is None:
                raise PeerError(f"{self.peer} died")
        if frame is None:
            return None
        if not isinstance(frame[0], tuple) or not frame[0]:
            raise ProtocolError(f"{self.peer} sent a {type(frame[0]).__name__} where a tuple was expected")
        return frame[0]

    def shutdown(self) -> None:
        """End the conversation both ways; wakes whoever waits on the socket."""
        shutdown(self._sock, self._pid_here)

    def close(self) -> None:
        """Release the descriptors."""
        self._reader.close()
        self._sock.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user id of the other end, from the kernel. The process id is 0 if it cannot be seen from here."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def shutdown(sock: socket.socket, pid: int) -> None:
    """End both directions of `sock` unless this is a forked child of process `pid`, whose socket it is."""
    if os.getpid() == pid:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def ready(filenos: Iterable[int], timeout_s: float) -> bool:
    """Whether any of `filenos` becomes readable (or its peer leaves) within `timeout_s` seconds."""
    poller = select.poll()
    for fileno in filenos:
        poller.register(fileno, select.POLLIN)
    return bool(poller.poll(min(math.ceil(timeout_s * 1000), 1 << 30)))


def wait_any(filenos: Iterable[int], deadline: Deadline, waiting_for: str) -> None:
    """Wait until any of `filenos` is readable. Raises `SyncTimeout` saying `waiting_for`."""
    filenos = list(filenos)
    while not ready(filenos, deadline.remaining(waiting_for)):
        pass


def address_of(name: Sequence[object]) -> str:
    """ "host:port" of a socket name, with brackets around an IPv6 address."""
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def _keep_alive(sock: socket.socket, peer: str) -> str:
    """Small frames go out at once; a host that vanished is noticed. Returns the address of the other end."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _VANISHED_S // _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _VANISHED_S // _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES - 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _VANISHED_S * 1000)
        return address_of(sock.getpeername())
    except OSError as error:
        raise PeerError(f"lost the connection to {peer}: {error.strerror or error}") from error


def not_for_children(sock: socket.socket) -> None:
    """A child that is forked later closes its copy: else the peer would hear of this process's death from it only."""
    _register()
    _own.add(sock)


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=_close_copies)


def _close_copies() -> None:
    for sock in list(_own):
        sock.close()


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:  # not visible from this namespace, or gone: the socket tells
        return None
