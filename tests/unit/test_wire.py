"""Frames: what travels comes back equal, and nothing malformed gets past `ProtocolError`."""

import array
import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wsync import wire
from wsync.deadline import Deadline
from wsync.errors import PeerError, ProtocolError, SyncTimeout, UnsupportedError
from wsync.plan import Owner, Plan, TensorSpec
from wsync.protocols import Manifest, Ticket
from wsync.regions import Region
from wsync.testing.actors import open_descriptors
from wsync.topology import Endpoint, Topology

SHORT_S = 0.2
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def soon() -> Deadline:
    return Deadline.after(20)


def a_plan(tensors: int = 40, owners: int = 2) -> Plan:
    dtypes = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)
    specs = [
        TensorSpec(
            name=f"model.layers.{i}.mlp.experts.{i}.gate_proj.weight",
            shape=(64, 16),
            dtype=dtypes[i % 3],
            owners=tuple(Owner(rank=r, region=Region(r * 512, (512,), (1,))) for r in range(owners)),
            atomic_group="tied" if i % 2 else None,
            optional=i % 5 == 0,
        )
        for i in range(tensors)
    ]
    return Plan.pack(specs, 8192)


def records() -> list[object]:
    plan = a_plan()
    here = Endpoint(host="boot", network=4026531840, process="a1b2", pid=7, device="cuda:GPU-1")
    manifest = Manifest(
        dtypes={"a": torch.float32},
        uses={"a": (Region(0, (2, 3), (8, 1)), Region(100, (), ()))},
        problems=("b is unknown",),
        replayed=3,
        through_loader={"c": "it is derived"},
        verified="bit-equal",
        endpoint=here,
    )
    ticket = Ticket(transport="shm", address="x", secret=os.urandom(32), generation=2)
    parts = [plan.specs[0], plan.buckets[0], plan.buckets[0].tensors[0], Region(0, (2,), (-1,))]
    return [plan, *parts, here, Topology(sender=here, receivers=(here, here)), manifest, ticket]


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
    | st.sampled_from([torch.bfloat16, torch.float8_e5m2, torch.uint64, torch.complex32]),
    lambda inner: st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(0, 9), inner),
    max_leaves=20,
)


@given(plain)
@settings(deadline=None)
def test_plain_data_comes_back_equal(value: object) -> None:
    again = wire.unpack(wire.pack(value))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("record", records(), ids=lambda record: type(record).__name__)
def test_records_come_back_equal(record: object) -> None:
    again = wire.unpack(wire.pack({"it": [record]}))
    assert again == {"it": (record,)}


def test_every_torch_dtype_travels_by_name() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert len(dtypes) > 20
    assert set(wire.unpack(wire.pack(sorted(dtypes, key=str)))) == dtypes  # type: ignore[call-overload]


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.zeros(1), 2**64, -(2**63) - 1, [[object()]], len])
def test_what_is_not_plain_data_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedError, match="cannot be sent"):
        wire.pack(value)


def test_data_that_refers_to_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UnsupportedError, match="cannot be sent"):
        wire.pack(loop)


@given(st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_random_bytes_are_decoded_or_refused(data: bytes) -> None:
    with suppress(ProtocolError):
        wire.unpack(data)


FRAMES = [wire.pack(record) for record in records()]


@given(st.sampled_from(FRAMES), st.data())
@settings(max_examples=500, deadline=None)
def test_damaged_records_are_decoded_or_refused(frame: bytes, data: st.DataObject) -> None:
    damaged = bytearray(frame[: data.draw(st.integers(0, len(frame)))])
    for _ in range(data.draw(st.integers(0, 4)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        wire.unpack(bytes(damaged))


@given(st.integers(0, 12), st.lists(plain, max_size=7))
@settings(max_examples=200, deadline=None)
def test_records_with_wrong_fields_are_refused(number: int, fields: list[object]) -> None:
    dtypes = [wire._encode(field) if isinstance(field, torch.dtype) else field for field in fields]
    tagged = [msgpack.ExtType(2, bytes([number])), *dtypes]
    frame = msgpack.packb(tagged, default=wire._encode, unicode_errors="surrogatepass")
    try:
        record = wire.unpack(frame)
    except ProtocolError:
        return
    assert wire.unpack(wire.pack(record)) == record


@pytest.mark.parametrize(
    "frame",
    [
        msgpack.packb(msgpack.ExtType(2, b"\x00")),
        msgpack.packb([1, msgpack.ExtType(2, b"\x00")]),
        msgpack.packb({"a": msgpack.ExtType(2, b"\x01")}),
        msgpack.packb([msgpack.ExtType(2, b"\xff"), 1]),
        msgpack.packb(msgpack.ExtType(1, b"os.system")),
        msgpack.packb(msgpack.ExtType(1, b"\xff\xfe")),
        msgpack.packb(msgpack.ExtType(9, b"float32")),
        msgpack.packb({(1, 2): 3, "x": b"y"})[:-1],
        b"\x81\x80\x01",  # a map as the key of a map
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
        b"\xdb\xff\xff\xff\xff",  # a text of 4 GiB
        b"\x91" * 5000 + b"\x01",  # nested 5,000 deep
        b"",
        b"\x01\x01",  # two values
        b"\xa2\xff\xff",  # not UTF-8
    ],
)
def test_malformed_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        wire.unpack(frame)


def test_no_frame_makes_the_decoder_allocate_much_more_than_its_length() -> None:
    # Each header claims as many elements as a decoder that trusts it would reserve, on each of 500 levels.
    frame = struct.pack("!BI", 0xDD, wire.MAX_ITEMS) * 500
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="malformed"):
            wire.unpack(frame)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_frames_and_descriptors_cross_a_socket(pair: Pair) -> None:
    left, right = pair
    read_end, write_end = os.pipe()
    message = ("hello", {"plan": a_plan()}, 2**64 - 1)
    before = open_descriptors()
    wire.send_frame(left, message, soon(), [write_end, read_end])
    wire.send_frame(left, "next", soon())
    received, fds = wire.recv_frame(right, soon(), max_fds=2)
    assert received == message
    assert wire.recv_frame(right, soon(), max_fds=2) == ("next", [])
    os.write(fds[0], b"through")
    assert os.read(fds[1], 10) == b"through"
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in fds:
        os.close(fd)
    assert open_descriptors() == before
    os.close(read_end)
    os.close(write_end)


def test_a_large_frame_crosses_in_pieces(pair: Pair) -> None:
    left, right = pair
    blob = os.urandom(5 << 20)
    sending = threading.Thread(target=wire.send_frame, args=(left, blob, soon()))
    sending.start()
    assert wire.recv_frame(right, soon()) == (blob, [])
    sending.join()


def test_a_frame_over_the_bound_is_refused_before_it_is_read(pair: Pair) -> None:
    left, right = pair
    left.sendall(struct.pack("!I", wire.MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match=str(wire.MAX_FRAME_BYTES + 1)):
        wire.recv_frame(right, soon())
    wire.send_frame(left, "x" * 100, soon())
    with pytest.raises(ProtocolError, match="the bound is 50"):
        wire.recv_frame(right, soon(), max_bytes=50)


def test_a_message_over_the_bound_is_not_sent(pair: Pair) -> None:
    with pytest.raises(ProtocolError, match="longer than the bound"):
        wire.send_frame(pair[0], bytes(wire.MAX_FRAME_BYTES), soon())
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)


@pytest.mark.parametrize("allowed", [0, 1])
def test_more_descriptors_than_allowed_are_closed(pair: Pair, allowed: int) -> None:
    left, right = pair
    before = open_descriptors()
    wire.send_frame(left, "take these", soon(), [0, 1, 2])
    with pytest.raises(ProtocolError, match=f"more than {allowed} descriptors"):
        wire.recv_frame(right, soon(), max_fds=allowed)
    assert open_descriptors() == before


def test_descriptors_of_a_broken_frame_are_closed(pair: Pair) -> None:
    left, right = pair
    before = open_descriptors()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1]))]
    left.sendmsg([struct.pack("!I", 3) + b"\xc1\xc1\xc1"], rights)
    with pytest.raises(ProtocolError, match="malformed"):
        wire.recv_frame(right, soon(), max_fds=2)
    left.sendmsg([struct.pack("!I", 300) + b"\x01"], rights)
    with pytest.raises(SyncTimeout):
        wire.recv_frame(right, Deadline.after(SHORT_S), max_fds=2)
    left.close()
    assert open_descriptors() == before - 1


@pytest.mark.parametrize(("sent", "place"), [(b"", "closed the connection$"), (b"\x00\x00\x00\x09ab", "in the middle")])
def test_the_end_of_the_stream_is_a_peer_error(pair: Pair, sent: bytes, place: str) -> None:
    left, right = pair
    left.sendall(sent)
    left.close()
    with pytest.raises(PeerError, match=f"worker 3 .*{place}"):
        wire.recv_frame(right, soon(), peer="worker 3")


def test_sending_to_nobody_is_a_peer_error(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(PeerError, match="worker 3"):
        wire.send_frame(pair[0], "hello", soon(), peer="worker 3")


def test_silence_and_a_full_socket_end_at_the_deadline(pair: Pair) -> None:
    left, right = pair
    with pytest.raises(SyncTimeout, match=r"0.2 s.*worker 3"):
        wire.recv_frame(right, Deadline.after(SHORT_S), peer="worker 3")
    with pytest.raises(SyncTimeout, match="worker 3 to take"):
        wire.send_frame(left, bytes(8 << 20), Deadline.after(SHORT_S), peer="worker 3")


def test_a_reader_takes_frames_as_they_come(pair: Pair) -> None:
    left, right = pair
    reader = wire.FrameReader(right)
    data = b"".join(struct.pack("!I", len(body)) + body for body in (wire.pack("one"), wire.pack(None), wire.pack([3])))
    seen = []
    for byte in data:
        left.send(bytes([byte]))
        frame = reader.step()
        if frame is not None:
            seen.append(frame)
    assert seen == [("one", []), (None, []), ((3,), [])]


def test_a_plan_of_5000_tensors_is_one_small_frame() -> None:
    frame = wire.pack(a_plan(5000, owners=1))
    assert len(frame) < 2 << 20
    assert wire.unpack(frame) == a_plan(5000, owners=1)
