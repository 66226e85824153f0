"""How two processes meet: a socket that one of them bound, proofs both ways, then a link.

    host                                        guest
      | <------- connect -------------------------- |   Unix: SO_PEERCRED must be this user on both sides
      | ------- challenge, nonce ----------------> |
      | <------ hello, index, generation, nonce,   |   proof: HMAC-SHA256 over both nonces with the ticket's secret,
      |         proof ---------------------------- |   which itself never travels
      | ------- welcome, facts, proof [+ fd] ----> |   or: refused, reason

On one host it is an abstract Unix socket with a random name, elsewhere TCP at an address that somebody chose. Nothing
but a short hello is read from whoever has not proven himself. Linux only.
"""

import hmac
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from wsync.deadline import Deadline
from wsync.errors import ConfigError, PeerError, ProtocolError, TransportError, WsyncError
from wsync.protocols import Ticket
from wsync.transports.dial import address_parts, dial
from wsync.transports.link import MAX_BYTES, Link, credentials, not_for_children, shutdown
from wsync.wire import FrameReader, pack, recv_frame, send_frame

_HELLO_BYTES = 4096
_NONCE_BYTES = 32
_BACKLOG = 4096
_BRIEFLY_S = 1.0  # for frames that fit an empty socket buffer: never waited for in practice
_SILENCE_S = 10.0
_MOST_VISITORS = 64
"""More than that at the door at once, beside those who are expected: the one that has been silent longest must go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What an admitted guest is told."""

    facts: tuple[int | str, ...] = ()
    fd: int | None = None
    """Travels beside the facts, over Unix sockets only."""


@dataclass(frozen=True, slots=True)
class _Visitor:
    """Connected, not yet proven."""

    sock: socket.socket
    reader: FrameReader
    nonce: bytes
    since: float


def listen_here(transport: str, generation: int) -> tuple[socket.socket, Ticket]:
    """An abstract Unix socket with a random name, for guests of this host and user, and the ticket for it."""
    address = f"wsync-{secrets.token_hex(16)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return _listen(sock, f"\0{address}", "an abstract Unix socket"), new_ticket(transport, address, generation)


def listen_at(address: str) -> socket.socket:
    """A TCP socket bound to `address`, "host:port" with port 0 for a free one. Its name is `address_of` its own.

    Raises `ConfigError` if that is no address, `TransportError` if it cannot be bound.
    """
    host, port = address_parts(address)
    try:
        family, kind, _, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{address!r} cannot be listened at: {error}") from error
    sock = socket.socket(family, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the last owner's closed connections may linger
    return _listen(sock, name, address)


def new_ticket(transport: str, address: str, generation: int) -> Ticket:
    """A ticket with a secret of its own."""
    return Ticket(transport=transport, address=address, secret=secrets.token_bytes(32), generation=generation)


class Listener:
    """The door of one process. Admits whoever has the ticket.

    Attributes:
        ticket: what guests need.
        absent: indexes that have not been admitted yet.
        refused: the latest reason why somebody was turned away, "" if nobody was.
    """

    def __init__(
        self, sock: socket.socket, ticket: Ticket, guests: int | None, *, first: int = 0, max_bytes: int = MAX_BYTES
    ) -> None:
        """Take over a listening socket.

        Args:
            sock: not blocking, and closed by `close`.
            ticket: its transport and address name the guests' goal in the proofs.
            guests: how many to admit, each index from `first` on once; None: anybody with the secret, any number.
            first: lowest index.
            max_bytes: longest frame, in bytes, that an admitted guest may send.
        """
        self.ticket = ticket
        self.absent = set(range(first, first + (guests or 0)))
        self.refused = ""
        self._anybody = guests is None
        self._max_bytes = max_bytes
        self._visitors: list[_Visitor] = []
        self._pid = os.getpid()
        self._sock = sock
        not_for_children(sock)
        self._down = False

    def filenos(self) -> list[int]:
        """Descriptors that become readable when there is something to `admit`."""
        return [self._sock.fileno(), *(visitor.sock.fileno() for visitor in self._visitors)]

    def admit(self, welcome: Welcome) -> Iterator[tuple[int, Link]]:
        """Go on with everybody at the door, without waiting; yields (index, link) of those that proved themselves.

        Whoever cannot is turned away, and nothing else fails for it. After `shutdown` nobody comes. Raises
        `TransportError` if the system has no descriptor for one more.
        """
        self._let_in()
        for visitor in list(self._visitors):
            try:
                frame = visitor.reader.step()
                if frame is not None:
                    admitted = self._greet(visitor, frame[0], welcome)
                    self._visitors.remove(visitor)
                    yield admitted
            except WsyncError as error:
                self._turn_away(visitor, str(error))

    def shutdown(self) -> None:
        """Turn everybody away; wakes whoever waits on `filenos`. May be called from any thread."""
        self._down = True
        for sock in (self._sock, *(visitor.sock for visitor in list(self._visitors))):
            shutdown(sock, self._pid)

    def close(self) -> None:
        """Release the name and the descriptors."""
        self._sock.close()
        while self._visitors:
            self._visitors.pop().sock.close()

    def _let_in(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:
                if self._down:
                    break
                raise TransportError(f"cannot accept a guest: {error}") from error
            nonce = secrets.token_bytes(_NONCE_BYTES)
            visitor = _Visitor(sock, FrameReader(sock, _HELLO_BYTES, peer="a receiver"), nonce, time.monotonic())
            self._visitors.append(visitor)
            try:
                _check_user(sock, "a receiver")
                send_frame(sock, ("challenge", nonce), Deadline.after(_BRIEFLY_S), peer="a receiver")
            except WsyncError as error:
                self._turn_away(visitor, str(error))
        silent = time.monotonic() - _SILENCE_S
        most = _MOST_VISITORS + len(self.absent)
        for visitor in [v for v in self._visitors if v.since < silent] or self._visitors[:-most]:
            self._turn_away(visitor, "it did not greet in time")

    def _greet(self, visitor: _Visitor, hello: object, welcome: Welcome) -> tuple[int, Link]:
        index, nonce = self._examine(visitor, hello)
        link = Link(visitor.sock, f"receiver {index}", self._max_bytes)
        try:
            proof = _proof(self.ticket, "sender", visitor.nonce, nonce, *welcome.facts)
            fds = () if welcome.fd is None else (welcome.fd,)
            link.send(("welcome", *welcome.facts, proof), Deadline.after(_BRIEFLY_S), fds)
        except WsyncError:
            link.close()
            raise
        self.absent.discard(index)
        return index, link

    def _examine(self, visitor: _Visitor, hello: object) -> tuple[int, bytes]:
        """Index and nonce of an expected guest that knows the secret. Else `ProtocolError` with the reason."""
        match hello:
            case ("hello", int(index), int(generation), bytes(nonce), bytes(proof)) if len(nonce) == _NONCE_BYTES:
                expected = _proof(self.ticket, "receiver", visitor.nonce, nonce, index, generation)
            case _:
                raise ProtocolError("it does not greet as a receiver does")
        if not hmac.compare_digest(proof, expected):
            raise ProtocolError("it does not know the secret of this ticket")
        if generation != self.ticket.generation:
            raise ProtocolError(f"its ticket is of generation {generation}, the sender of {self.ticket.generation}")
        if index not in self.absent and not self._anybody:
            raise ProtocolError(f"receiver {index} is connected already or was never expected")
        return index, nonce

    def _turn_away(self, visitor: _Visitor, reason: str) -> None:
        self.refused = reason
        self._visitors.remove(visitor)
        if visitor.sock.fileno() >= 0:
            with suppress(WsyncError):
                send_frame(visitor.sock, ("refused", reason), Deadline.after(_BRIEFLY_S))
            visitor.sock.close()


def connect(
    ticket: Ticket,
    index: int,
    deadline: Deadline,
    *,
    at: str | None = None,
    peer: str = "the sender",
    max_bytes: int = MAX_BYTES,
) -> tuple[Link, Welcome]:
    """Reach the host of `ticket` as guest `index`. The caller owns the link and `Welcome.fd`.

    Args:
        at: where to connect; None: at the ticket's address. With a port it is TCP, else a Unix socket of this host.
        peer: who is expected there, for messages.
        max_bytes: longest frame, in bytes, that the host may send.

    Raises `PeerError` if nobody is there, it refuses or is not the one that made the ticket, `SyncTimeout`.
    """
    sock = dial(ticket.address if at is None else at, peer, deadline)
    try:
        welcome = _introduce(sock, ticket, index, deadline, peer)
        try:
            return Link(sock, peer, max_bytes), welcome
        except BaseException:
            if welcome.fd is not None:
                os.close(welcome.fd)
            raise
    except BaseException:
        sock.close()
        raise


def _introduce(sock: socket.socket, ticket: Ticket, index: int, deadline: Deadline, peer: str) -> Welcome:
    _check_user(sock, peer)
    challenge, _ = recv_frame(sock, deadline, MAX_BYTES, peer=peer)
    match challenge:
        case ("challenge", bytes(their_nonce)) if len(their_nonce) == _NONCE_BYTES:
            nonce = secrets.token_bytes(_NONCE_BYTES)
        case _:
            raise _refusal(index, challenge, peer)
    proof = _proof(ticket, "receiver", their_nonce, nonce, index, ticket.generation)
    send_frame(sock, ("hello", index, ticket.generation, nonce, proof), deadline, peer=peer)
    answer, fds = recv_frame(sock, deadline, MAX_BYTES, max_fds=1 if sock.family == socket.AF_UNIX else 0, peer=peer)
    match answer:
        case ("welcome", *facts, bytes(proof)):
            known = tuple(fact for fact in facts if isinstance(fact, (int, str)))
            if hmac.compare_digest(proof, _proof(ticket, "sender", their_nonce, nonce, *known)):
                return Welcome(facts=known, fd=fds[0] if fds else None)
    for fd in fds:
        os.close(fd)
    raise _refusal(index, answer, peer)


def _refusal(index: int, answer: object, peer: str) -> PeerError:
    match answer:
        case ("refused", str(reason)):
            return PeerError(f"{peer} refuses receiver {index}: {reason}")
    return PeerError(f"receiver {index} reached a process that does not answer as this ticket's sender")


def _listen(sock: socket.socket, name: object, where: str) -> socket.socket:
    sock.setblocking(False)
    try:
        sock.bind(name)  # type: ignore[arg-type]
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise TransportError(f"cannot listen on {where}: {error}") from error
    return sock


def _check_user(sock: socket.socket, peer: str) -> None:
    if sock.family != socket.AF_UNIX:
        return  # the kernel cannot tell; the proof must do
    pid, uid = credentials(sock)
    if uid != os.geteuid():
        raise PeerError(f"{peer}, process {pid}, belongs to user {uid} and not to user {os.geteuid()}")


def _proof(ticket: Ticket, role: str, *facts: object) -> bytes:
    return hmac.digest(ticket.secret, pack((role, ticket.address, *facts)), "sha256")
