"""Frames of the control plane: msgpack, length-prefixed, bounded before allocation. No pickle.

    frame   4 bytes, big-endian: length of the body | body: one msgpack value
    dtype   ext 1, its name ("bfloat16")
    record  array: ext 2 with the record's number, then its fields in the order of `_schemas`

Only the records listed in `_schemas` exist; no name from the wire is ever looked up. Descriptors travel beside a frame
over Unix sockets (SCM_RIGHTS).
"""

import array
import math
import os
import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import msgpack
import torch

from wsync.deadline import Deadline
from wsync.errors import ClosedError, PeerError, ProtocolError, UnsupportedError

MAX_FRAME_BYTES = 64 << 20
"""Longest body, in bytes, that is sent or accepted unless the caller sets less."""

MAX_ITEMS = 1 << 18
"""Longest array or map in a frame. Bounds what a short frame can make the decoder allocate."""

_PREFIX = struct.Struct("!I")
_DTYPE, _RECORD = 1, 2
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_FD_BYTES = array.array("i").itemsize
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class _Tag(int):
    """Number of a record, as the first element of its array. Never leaves the decoder."""


@dataclass(frozen=True, slots=True)
class _Field:
    """What a field may hold: exact types, then a check of what is inside."""

    types: tuple[type, ...]
    check: Callable[[Any], bool] | None = None


def _only(kind: type) -> _Field:
    return _Field((tuple,), lambda value: {kind}.issuperset(map(type, value)))


def _map(item: _Field) -> _Field:
    def fits(value: object) -> bool:
        return type(value) in item.types and (item.check is None or item.check(value))

    return _Field((dict,), lambda value: {str}.issuperset(map(type, value)) and all(map(fits, value.values())))


_TEXT, _BYTES, _FLAG, _INTEGERS, _TEXTS = _Field((str,)), _Field((bytes,)), _Field((bool,)), _only(int), _only(str)
_DTYPE_FIELD = _Field((torch.dtype,))
_NATURAL = _Field((int,), (0).__le__)
_NATURALS = _Field((tuple,), lambda value: not value or (set(map(type, value)) == {int} and min(value) >= 0))


class _Schema:
    """One record: how its array is checked and built. Written for speed: a plan has tens of thousands of them."""

    def __init__(self, record: type, **fields: _Field) -> None:
        self.record, self.names = record, tuple(fields)
        self._signatures = set(product((_Tag,), *(field.types for field in fields.values())))
        self._checks = [(i, field.check) for i, field in enumerate(fields.values(), 1) if field.check]

    def build(self, items: list[Any]) -> object:
        """The record from its tagged array. Raises `ValueError` if a field cannot hold what is there."""
        if tuple(map(type, items)) not in self._signatures:
            raise ValueError(f"{self.record.__name__} with fields {[type(item).__name__ for item in items[1:7]]}")
        for position, check in self._checks:
            if not check(items[position]):
                raise ValueError(f"{self.record.__name__}.{self.names[position - 1]} holds a wrong value")
        del items[0]
        return self.record(**dict(zip(self.names, items)))  # noqa: B905


@cache
def _schemas() -> tuple[_Schema, ...]:
    # Imported here: the contracts import modules that import this one.
    from wsync.plan import Bucket, Owner, Plan, TensorMeta, TensorSpec
    from wsync.protocols import Manifest, Ticket
    from wsync.pull.exports import Export, Probe, Share
    from wsync.regions import Region
    from wsync.topology import Endpoint, Topology
    from wsync.transports.references import Segment
    from wsync.views import Place

    layout = {"name": _TEXT, "shape": _NATURALS, "dtype": _DTYPE_FIELD}
    position = {"offset": _NATURAL, "chunk_offset": _NATURAL, "chunk_nbytes": _NATURAL}
    turn = _Field((int, type(None)), lambda rank: rank is None or rank >= 0)
    group, word = _Field((str, type(None))), _Field((int,), (1, 2, 4, 8).__contains__)
    return (
        _Schema(Region, offset=_NATURAL, sizes=_NATURALS, strides=_INTEGERS),
        _Schema(Owner, rank=_NATURAL, region=_Field((Region,))),
        _Schema(TensorSpec, **layout, owners=_only(Owner), atomic_group=group, optional=_FLAG, word_bytes=word),
        _Schema(TensorMeta, **layout, **position),
        _Schema(Bucket, index=_NATURAL, tensors=_only(TensorMeta), nbytes=_NATURAL, pulled=_FLAG, sender=turn),
        _Schema(Plan, specs=_only(TensorSpec), buckets=_only(Bucket), bucket_bytes=_NATURAL, in_place=_FLAG),
        _Schema(Place, memory=_NATURAL, dtype=_DTYPE_FIELD, region=_Field((Region,))),
        _Schema(Endpoint, host=_TEXT, network=_NATURAL, process=_TEXT, pid=_NATURAL, device=_TEXT),
        _Schema(Topology, sender=_Field((Endpoint,)), receivers=_only(Endpoint)),
        _Schema(Ticket, transport=_TEXT, address=_TEXT, secret=_BYTES, generation=_NATURAL),
        _Schema(
            Manifest,
            dtypes=_map(_DTYPE_FIELD),
            uses=_map(_only(Region)),
            problems=_TEXTS,
            replayed=_NATURAL,
            through_loader=_map(_TEXT),
            verified=_TEXT,
            endpoint=_Field((Endpoint,)),
        ),
        _Schema(Share, tensor=_NATURAL, elements=_Field((Region,)), place=_Field((Place,))),
        _Schema(
            Export,
            rank=_NATURAL,
            endpoint=_Field((Endpoint,)),
            segments=_only(Segment),
            addresses=_NATURALS,
            sizes=_NATURALS,
            parts=_only(Share),
            staged=_only(Share),
        ),
        _Schema(
            Probe,
            rank=_NATURAL,
            endpoint=_Field((Endpoint,)),
            segments=_only(Segment),
            address=_NATURAL,
            value=_BYTES,
        ),
        _Schema(Segment, key=_TEXT, start=_NATURAL, nbytes=_NATURAL),
    )


@cache
def _encoders() -> dict[type, tuple[msgpack.ExtType, tuple[str, ...]]]:
    return {s.record: (msgpack.ExtType(_RECORD, bytes([n])), s.names) for n, s in enumerate(_schemas())}


@cache
def _encoded_dtype(dtype: torch.dtype) -> msgpack.ExtType:
    return msgpack.ExtType(_DTYPE, str(dtype).removeprefix("torch.").encode())


def _encode(value: object) -> object:
    encoder = _encoders().get(type(value))
    if encoder is not None:
        tag, names = encoder
        return [tag, *[getattr(value, name) for name in names]]
    if isinstance(value, torch.dtype):
        return _encoded_dtype(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise UnsupportedError(f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be sent")


def pack(message: object) -> bytes:
    """Encode plain data (None, bool, int, float, str, bytes, list, tuple, dict), dtypes and contract dataclasses.

    Integers fit in 64 bits, signed or unsigned. Raises `UnsupportedError` for anything else.
    """
    try:
        packed: bytes = msgpack.packb(message, default=_encode, unicode_errors="surrogatepass")
    except (ValueError, OverflowError, RecursionError) as error:
        raise UnsupportedError(f"a message cannot be sent: {error}") from error
    return packed


class _Decoder:
    """Hooks for one message. Counts tags, so that one outside the head of an array is noticed."""

    def __init__(self) -> None:
        self.unused_tags = 0

    def ext(self, code: int, data: bytes) -> object:
        if code == _RECORD and len(data) == 1 and data[0] < len(_schemas()):
            self.unused_tags += 1
            return _Tag(data[0])
        dtype = _DTYPES.get(data.decode("ascii")) if code == _DTYPE else None
        if dtype is None:
            raise ValueError(f"unknown extension {code} {data[:40]!r}")
        return dtype

    def array(self, items: list[object]) -> object:
        if not items or type(items[0]) is not _Tag:
            return tuple(items)
        self.unused_tags -= 1
        return _schemas()[items[0]].build(items)


def unpack(data: bytes | bytearray) -> object:
    """Decode what `pack` made; sequences come back as tuples. Raises `ProtocolError` on anything else."""
    decoder = _Decoder()
    try:
        message: object = msgpack.unpackb(
            data,
            ext_hook=decoder.ext,
            list_hook=decoder.array,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            timestamp=1,
            max_array_len=min(len(data), MAX_ITEMS),
            max_map_len=min(len(data), MAX_ITEMS),
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"malformed message of {len(data)} bytes: {str(error) or type(error).__name__}") from error
    if decoder.unused_tags:
        raise ProtocolError(f"malformed message of {len(data)} bytes: a record tag stands alone")
    return message


def wait_ready(sock: socket.socket, events: int, deadline: Deadline, waiting_for: str) -> None:
    """Wait until `sock` has one of the poll `events`. Raises `SyncTimeout`, or `ClosedError` if `sock` is closed."""
    if sock.fileno() < 0:
        raise ClosedError(f"the socket was closed while waiting for {waiting_for}")
    poller = select.poll()
    poller.register(sock, events)
    while not poller.poll(min(math.ceil(deadline.remaining(waiting_for) * 1000), 1 << 30)):
        pass


def send_frame(
    sock: socket.socket,
    message: object,
    deadline: Deadline,
    fds: Sequence[int] = (),
    *,
    peer: str = "the peer",
) -> None:
    """Send one frame, with `fds` beside it. The socket must not have a timeout of its own.

    After an error part of the frame may be out: close the socket. Raises `PeerError` if `peer` is gone, `SyncTimeout`,
    `ProtocolError` if the message is longer than `MAX_FRAME_BYTES`.
    """
    rest = memoryview(frame_of(message))
    while rest:
        left = offer(sock, rest, fds, peer=peer)
        if len(left) == len(rest):
            wait_ready(sock, select.POLLOUT, deadline, f"{peer} to take {len(rest)} bytes of a message")
        else:
            rest, fds = left, ()


def frame_of(message: object) -> bytes:
    """The bytes of one frame. Raises `ProtocolError` if the message is longer than `MAX_FRAME_BYTES`."""
    body = pack(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes is longer than the bound of {MAX_FRAME_BYTES} bytes")
    return _PREFIX.pack(len(body)) + body


def offer(sock: socket.socket, data: memoryview, fds: Sequence[int] = (), *, peer: str = "the peer") -> memoryview:
    """Send what `sock` takes of `data` without waiting, `fds` beside the first byte. Returns the rest.

    Raises `PeerError` if `peer` is gone.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        return data[sock.sendmsg([data], rights, socket.MSG_DONTWAIT) :]
    except BlockingIOError:
        return data
    except OSError as error:
        raise _lost(sock, peer, error) from error


def recv_frame(
    sock: socket.socket,
    deadline: Deadline,
    max_bytes: int = MAX_FRAME_BYTES,
    max_fds: int = 0,
    *,
    peer: str = "the peer",
) -> tuple[object, list[int]]:
    """Receive one frame and the descriptors that came with it, which the caller then owns.

    No byte after the frame is taken. After an error every descriptor is closed; close the socket too. Raises
    `PeerError` if `peer` is gone, `SyncTimeout`, `ProtocolError` if the frame is malformed or over a bound.
    """
    reader = FrameReader(sock, max_bytes, max_fds, peer=peer)
    try:
        while (frame := reader.step()) is None:
            wait_ready(sock, select.POLLIN, deadline, f"a message from {peer}")
    except BaseException:
        reader.close()
        raise
    return frame


class FrameReader:
    """Takes frames off a socket as far as they have come, without waiting: for loops that wait on many sockets."""

    def __init__(
        self, sock: socket.socket, max_bytes: int = MAX_FRAME_BYTES, max_fds: int = 0, *, peer: str = "the peer"
    ) -> None:
        self._sock, self._max_bytes, self._max_fds, self._peer = sock, max_bytes, max_fds, peer
        self._in_body = False
        self._fds: list[int] = []
        self._expect(_PREFIX.size)

    def _expect(self, nbytes: int) -> None:
        self._buffer = bytearray(nbytes)
        self._filled = 0

    def step(self) -> tuple[object, list[int]] | None:
        """The next frame and its descriptors, or None if not all of it is here yet. Raises as `recv_frame`."""
        while True:
            while self._filled < len(self._buffer):
                if not self._receive():
                    return None
            if self._in_body:
                message, fds = unpack(self._buffer), self._fds
                self._in_body, self._fds = False, []
                self._expect(_PREFIX.size)
                return message, fds
            (nbytes,) = _PREFIX.unpack(self._buffer)
            if nbytes > self._max_bytes:
                raise ProtocolError(
                    f"{self._peer} announced a message of {nbytes} bytes; the bound is {self._max_bytes}"
                )
            self._in_body = True
            self._expect(nbytes)

    def close(self) -> None:
        """Close the descriptors of a frame that never became whole. The socket is not touched."""
        while self._fds:
            os.close(self._fds.pop())

    def _receive(self) -> bool:
        """Take more bytes of the current part; False if none are there."""
        room = socket.CMSG_LEN(self._max_fds * _FD_BYTES) if self._max_fds else 0
        view = memoryview(self._buffer)[self._filled :]
        try:
            nbytes, ancillary, flags, _ = self._sock.recvmsg_into([view], room, socket.MSG_DONTWAIT | _CLOEXEC)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _lost(self._sock, self._peer, error) from error
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds += array.array("i", data[: len(data) - len(data) % _FD_BYTES])
        if flags & socket.MSG_CTRUNC or len(self._fds) > self._max_fds:
            raise ProtocolError(f"{self._peer} sent more than {self._max_fds} descriptors with a message")
        if not nbytes:
            place = " in the middle of a message" if self._filled or self._in_body else ""
            raise PeerError(f"{self._peer} closed the connection{place}")
        self._filled += nbytes
        return True


def _lost(sock: socket.socket, peer: str, error: OSError) -> PeerError | ClosedError:
    if sock.fileno() < 0:
        return ClosedError(f"the connection to {peer} was closed on this side")
    return PeerError(f"lost the connection to {peer}: {error.strerror or error}")
