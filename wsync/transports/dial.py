"""Connecting a socket, within a deadline."""

import errno
import ipaddress
import os
import select
import socket
import struct

from wsync.deadline import Deadline
from wsync.errors import ConfigError, PeerError, SyncTimeout
from wsync.wire import wait_ready

_TIMEVAL = struct.Struct("ll")  # seconds, microseconds


def address_parts(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[host]:port". Raises `ConfigError` if it is neither."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f'{address!r} is no address; write "host:port", with brackets around an IPv6 host')
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether `host` is this host, whichever one reads it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def dial(address: str, peer: str, deadline: Deadline) -> socket.socket:
    """A connected socket that does not block: TCP if `address` has a port, else a Unix socket of this host.

    Raises `PeerError` if nobody listens there, `SyncTimeout`.
    """
    if ":" not in address:
        return _dial_here(address, peer, deadline)
    host, port = address_parts(address)
    try:
        family, kind, _, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise PeerError(f"{peer} at {address} cannot be found: {error}") from error
    sock = socket.socket(family, kind)
    try:
        sock.setblocking(False)
        sock.connect_ex(name)
        wait_ready(sock, select.POLLOUT, deadline, f"{peer} at {address} to take the connection")
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if not code and sock.getsockname() == sock.getpeername():
            code = errno.ECONNREFUSED  # the kernel picked the port that nobody listens at, and met itself
        if code:
            refused = OSError(code, os.strerror(code))
            raise PeerError(f"{peer} does not listen at {address}: {refused.strerror}") from refused
    except BaseException:
        sock.close()
        raise
    return sock


def _dial_here(address: str, peer: str, deadline: Deadline) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left = deadline.remaining(f"{peer} to take the connection")
    # A kernel-side limit: connecting to a full queue of a Unix socket cannot be waited for with poll.
    timeval = _TIMEVAL.pack(int(left), max(1, int(left % 1 * 1e6)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    try:
        sock.connect(f"\0{address}")
    except BlockingIOError as error:
        sock.close()
        raise SyncTimeout(f"gave up after {deadline.timeout_s:g} s: {peer} takes no connections") from error
    except OSError as error:
        sock.close()
        raise PeerError(f"no sender listens at this ticket's address ({error}): it closed, died, or is full") from error
    sock.setblocking(False)
    return sock
