"""How receivers reach a sender on the same host: an abstract Unix socket, proofs both ways, a descriptor beside.

    sender                                      receiver
      | <------- connect to a random name -------- |   both sides: SO_PEERCRED must be this user
      | ------- challenge, nonce ----------------> |
      | <------ hello, index, generation, nonce,   |   proof: HMAC-SHA256 over both nonces with the ticket's secret,
      |         proof ---------------------------- |   which itself never travels
      | ------- welcome, slots, proof + memfd ---> |   or: refused, reason

Linux only: other systems have neither abstract names nor memfd.
"""

import hmac
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from wsync.deadline import Deadline
from wsync.errors import PeerError, ProtocolError, SyncTimeout, TransportError, WsyncError
from wsync.protocols import Ticket
from wsync.transports.link import MAX_BYTES, Link, credentials, shutdown
from wsync.wire import FrameReader, pack, recv_frame, send_frame

_HELLO_BYTES = 4096
_NONCE_BYTES = 32
_TIMEVAL = struct.Struct("ll")  # seconds, microseconds
_BRIEFLY_S = 1.0  # for frames that fit an empty socket buffer: never waited for in practice


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What an admitted receiver is given: shared memory of `num_slots` slots of `slot_bytes` bytes."""

    fd: int
    slot_bytes: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class _Visitor:
    """Connected, not yet proven."""

    sock: socket.socket
    reader: FrameReader
    nonce: bytes


class Listener:
    """The sender's door. Admits each receiver of a ticket once.

    Attributes:
        ticket: what receivers need.
        absent: indexes that have not been admitted yet.
        refused: the latest reason why somebody was turned away, "" if nobody was.
    """

    def __init__(self, transport: str, receivers: int, generation: int) -> None:
        self.ticket = Ticket(
            transport=transport,
            address=f"wsync-{secrets.token_hex(16)}",
            secret=secrets.token_bytes(32),
            generation=generation,
        )
        self.absent = set(range(receivers))
        self.refused = ""
        self._visitors: list[_Visitor] = []
        self._pid = os.getpid()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        try:
            self._sock.bind(f"\0{self.ticket.address}")
            self._sock.listen(receivers + 16)
        except OSError as error:
            self._sock.close()
            raise TransportError(f"cannot listen on an abstract Unix socket: {error}") from error

    def filenos(self) -> list[int]:
        """Descriptors that become readable when there is something to `admit`."""
        return [self._sock.fileno(), *(visitor.sock.fileno() for visitor in self._visitors)]

    def admit(self, welcome: Welcome) -> Iterator[tuple[int, Link]]:
        """Go on with everybody at the door, without waiting; yields (index, link) of those that proved themselves.

        Whoever cannot is turned away, and nothing else fails for it.
        """
        self._let_in()
        for visitor in list(self._visitors):
            try:
                frame = visitor.reader.step()
                if frame is not None:
                    yield self._greet(visitor, frame[0], welcome)
                    self._visitors.remove(visitor)
            except WsyncError as error:
                self._turn_away(visitor, str(error))

    def shutdown(self) -> None:
        """Turn everybody away; wakes whoever waits on `filenos`. May be called from any thread."""
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
            except BlockingIOError:
                return
            except OSError as error:
                raise TransportError(f"cannot accept a receiver: {error}") from error
            nonce = secrets.token_bytes(_NONCE_BYTES)
            visitor = _Visitor(sock, FrameReader(sock, _HELLO_BYTES, peer="a receiver"), nonce)
            self._visitors.append(visitor)
            try:
                _check_user(sock, "a receiver")
                send_frame(sock, ("challenge", nonce), Deadline.after(_BRIEFLY_S), peer="a receiver")
            except WsyncError as error:
                self._turn_away(visitor, str(error))

    def _greet(self, visitor: _Visitor, hello: object, welcome: Welcome) -> tuple[int, Link]:
        index, nonce = self._examine(visitor, hello)
        link = Link(visitor.sock, f"receiver {index}")
        try:
            numbers = (welcome.slot_bytes, welcome.num_slots)
            proof = _proof(self.ticket, "sender", visitor.nonce, nonce, *numbers)
            link.send(("welcome", *numbers, proof), Deadline.after(_BRIEFLY_S), (welcome.fd,))
        except WsyncError:
            link.close()
            raise
        self.absent.remove(index)
        return index, link

    def _examine(self, visitor: _Visitor, hello: object) -> tuple[int, bytes]:
        """Index and nonce of an expected receiver that knows the secret. Else `ProtocolError` with the reason."""
        match hello:
            case ("hello", int(index), int(generation), bytes(nonce), bytes(proof)) if len(nonce) == _NONCE_BYTES:
                expected = _proof(self.ticket, "receiver", visitor.nonce, nonce, index, generation)
            case _:
                raise ProtocolError("it does not greet as a receiver does")
        if not hmac.compare_digest(proof, expected):
            raise ProtocolError("it does not know the secret of this ticket")
        if generation != self.ticket.generation:
            raise ProtocolError(f"its ticket is of generation {generation}, the sender of {self.ticket.generation}")
        if index not in self.absent:
            raise ProtocolError(f"receiver {index} is connected already or was never expected")
        return index, nonce

    def _turn_away(self, visitor: _Visitor, reason: str) -> None:
        self.refused = reason
        self._visitors.remove(visitor)
        if visitor.sock.fileno() >= 0:
            with suppress(WsyncError):
                send_frame(visitor.sock, ("refused", reason), Deadline.after(_BRIEFLY_S))
            visitor.sock.close()


def connect(ticket: Ticket, index: int, deadline: Deadline) -> tuple[Link, Welcome]:
    """Reach the sender of `ticket` as receiver `index`. The caller owns the link and `Welcome.fd`.

    Raises `PeerError` if the sender is gone, refuses or is not the one that made the ticket, `SyncTimeout`.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _connect(sock, ticket, deadline)
        sock.setblocking(False)
        welcome = _introduce(sock, ticket, index, deadline)
        try:
            return Link(sock, "the sender"), welcome
        except BaseException:
            os.close(welcome.fd)
            raise
    except BaseException:
        sock.close()
        raise


def _connect(sock: socket.socket, ticket: Ticket, deadline: Deadline) -> None:
    left = deadline.remaining("the sender to take the connection")
    # A kernel-side limit: connecting to a full queue of a Unix socket cannot be waited for with poll.
    timeval = _TIMEVAL.pack(int(left), max(1, int(left % 1 * 1e6)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    try:
        sock.connect(f"\0{ticket.address}")
    except BlockingIOError as error:
        raise SyncTimeout(f"gave up after {deadline.timeout_s:g} s: the sender takes no connections") from error
    except OSError as error:
        raise PeerError(f"no sender listens at this ticket's address ({error}): it closed, died, or is full") from error


def _introduce(sock: socket.socket, ticket: Ticket, index: int, deadline: Deadline) -> Welcome:
    _check_user(sock, "the sender")
    challenge, _ = recv_frame(sock, deadline, MAX_BYTES, peer="the sender")
    match challenge:
        case ("challenge", bytes(their_nonce)) if len(their_nonce) == _NONCE_BYTES:
            nonce = secrets.token_bytes(_NONCE_BYTES)
        case _:
            raise _refusal(index, challenge)
    proof = _proof(ticket, "receiver", their_nonce, nonce, index, ticket.generation)
    send_frame(sock, ("hello", index, ticket.generation, nonce, proof), deadline, peer="the sender")
    answer, fds = recv_frame(sock, deadline, MAX_BYTES, max_fds=1, peer="the sender")
    match answer:
        case ("welcome", int(slot_bytes), int(num_slots), bytes(proof)) if fds:
            expected = _proof(ticket, "sender", their_nonce, nonce, slot_bytes, num_slots)
            if hmac.compare_digest(proof, expected):
                return Welcome(fd=fds[0], slot_bytes=slot_bytes, num_slots=num_slots)
    for fd in fds:
        os.close(fd)
    raise _refusal(index, answer)


def _refusal(index: int, answer: object) -> PeerError:
    match answer:
        case ("refused", str(reason)):
            return PeerError(f"the sender refuses receiver {index}: {reason}")
    return PeerError(f"receiver {index} reached a process that does not answer as this ticket's sender")


def _check_user(sock: socket.socket, peer: str) -> None:
    pid, uid = credentials(sock)
    if uid != os.geteuid():
        raise PeerError(f"{peer}, process {pid}, belongs to user {uid} and not to user {os.geteuid()}")


def _proof(ticket: Ticket, role: str, *facts: object) -> bytes:
    return hmac.digest(ticket.secret, pack((role, ticket.address, *facts)), "sha256")
