"""What only shm promises: death through forked children, strangers turned away, nothing left behind."""

import gc
import os
import signal
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from wsync import wire
from wsync.deadline import Deadline
from wsync.errors import PeerError, ProtocolError, SyncTimeout, TransportError
from wsync.protocols import Receiver, Sender
from wsync.testing.actors import Actor, descriptors
from wsync.testing.bench import BUCKET_BYTES, Bench, check_equal, expect
from wsync.testing.samples import fill_slot, plan_of, tensor_zoo
from wsync.transports import listener, memfd
from wsync.transports.shm import ShmTransport
from wsync.transports.slots import SlotSender

BENCH = Bench(make=ShmTransport, processes=True)
TENSORS = tensor_zoo(1, 4 * BUCKET_BYTES)
PLAN = plan_of(TENSORS, BUCKET_BYTES)


def make_sender(receivers: int = 1) -> SlotSender:
    return ShmTransport().sender(slot_bytes=PLAN.capacity, num_slots=2, receivers=receivers, generation=1)


def connected(sender: Sender) -> Receiver:
    """A receiver in this process."""
    accepting = threading.Thread(target=sender.accept, args=(BENCH.deadline,))
    accepting.start()
    receiver = ShmTransport().receiver(sender.ticket(), 0, BENCH.deadline)
    accepting.join()
    return receiver


def traces_of(sender: SlotSender) -> list[str]:
    """Names and mappings that the sender's resources have in the system now."""
    address = sender.ticket().address
    names = [line for line in Path("/proc/net/unix").read_text().splitlines() if address in line]
    mappings = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:wsync" in line]
    files = [str(path) for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob(f"*{address}*")]
    return names + mappings + files


@pytest.mark.parametrize("kill_at", [None, 1])
def test_nothing_is_left_in_the_system(kill_at: int | None) -> None:
    BENCH.deliver(TENSORS)
    gc.collect()
    before = descriptors()
    sender = make_sender()
    assert len(traces_of(sender)) == 2
    with BENCH.consumer(sender, PLAN, kill_at=kill_at) as actor:
        sender.accept(BENCH.deadline)
        if kill_at is None:
            BENCH.send(sender, PLAN, TENSORS)
            actor.hear("connected")
            check_equal(actor.hear("synced"), TENSORS)
        else:
            with expect(PeerError, "receiver 0"):
                BENCH.send(sender, PLAN, TENSORS)
    gc.collect()
    assert traces_of(sender) == []
    assert not descriptors() - before


def test_a_sender_that_is_dropped_without_closing_leaves_nothing_and_is_missed() -> None:
    gc.collect()
    before = descriptors()
    sender = make_sender()
    ticket = sender.ticket()
    receiver = connected(sender)
    del sender
    gc.collect()
    with pytest.raises(PeerError, match="the sender"):
        next(receiver.buckets(PLAN, BENCH.deadline))
    del receiver
    gc.collect()
    assert not descriptors() - before
    with pytest.raises(PeerError, match="no sender listens"):
        ShmTransport().receiver(ticket, 0, BENCH.deadline)


def hold_a_fork_and_die(pipe: Connection) -> None:
    """A trainer with a forked data loader: the child keeps every socket of its parent open after the parent's death."""
    sender = make_sender()
    pipe.send(("ticket", sender.ticket()))
    sender.accept(BENCH.deadline)
    hold, release = os.pipe()
    child = os.fork()
    if not child:
        os.close(release)
        pipe.close()
        os.read(hold, 1)
        os._exit(0)
    pipe.send(("child", child))
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_death_is_heard_although_a_forked_child_holds_the_socket() -> None:
    with Actor(True, BENCH.timeout_s, hold_a_fork_and_die) as actor:
        receiver = ShmTransport().receiver(actor.hear("ticket"), 0, BENCH.deadline)
        child = os.pidfd_open(actor.hear("child"))
        try:
            actor.signal(signal.SIGSTOP)
            with pytest.raises(SyncTimeout, match="bucket 0"):
                next(receiver.buckets(PLAN, Deadline.after(BENCH.short_s)))
            actor.signal(signal.SIGKILL)
            # A dying process closes its sockets a moment before its death can be seen.
            with pytest.raises(PeerError, match=r"died|closed the connection"):
                next(receiver.buckets(PLAN, BENCH.deadline))
        finally:
            signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)
            receiver.close()


def test_a_forked_child_that_ends_does_not_end_its_parents_conversation() -> None:
    sender = make_sender()
    receiver = connected(sender)
    child = os.fork()
    if not child:
        sender.close()
        receiver.close()
        os._exit(0)
    os.waitpid(child, 0)
    fill_slot(PLAN.buckets[0], sender.acquire(BENCH.deadline), TENSORS)
    sender.commit(PLAN.buckets[0])
    bucket, tensors = next(receiver.buckets(PLAN, BENCH.deadline))
    assert bucket == PLAN.buckets[0]
    first = TENSORS[bucket.tensors[0].name]
    assert torch.equal(tensors[0].view(torch.uint8), first.view(torch.uint8))
    receiver.close()
    sender.close()


def knock(sender: Sender, *frames: bytes) -> socket.socket:
    """A stranger of this user at the sender's door who sends `frames`."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect(f"\0{sender.ticket().address}")
    for frame in frames:
        stranger.sendall(frame)
    return stranger


def test_strangers_are_turned_away_and_the_invited_one_is_served() -> None:
    with BENCH.sender(PLAN) as sender:
        hello = wire.pack(("hello", 0, 1, bytes(32), bytes(32)))
        strangers = [
            knock(sender),
            knock(sender, b"GET / HTTP/1.1\r\n\r\n"),
            knock(sender, b"\xff\xff\xff\xff"),
            knock(sender, b"\x00\x00\x00\x01\xc1"),
            knock(sender, b"\x00\x00\x00\x05ab"),
            knock(sender, len(hello).to_bytes(4, "big") + hello),
        ]
        with BENCH.consumer(sender, PLAN) as actor:
            sender.accept(BENCH.deadline)
            actor.hear("connected")
            BENCH.send(sender, PLAN, TENSORS)
            check_equal(actor.hear("synced"), TENSORS)
        for stranger in strangers:
            stranger.close()


def test_a_stranger_is_named_when_nobody_else_comes() -> None:
    sender = make_sender()
    hello = wire.pack(("hello", 0, 1, bytes(32), bytes(32)))
    stranger = knock(sender, len(hello).to_bytes(4, "big") + hello)
    with pytest.raises(SyncTimeout, match=r"\[0\] to connect \(turned away: it does not know the secret"):
        sender.accept(Deadline.after(BENCH.short_s))
    stranger.close()
    sender.close()


def test_another_user_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "credentials", lambda sock: (4711, os.geteuid() + 1))
    sender = make_sender()
    stranger = knock(sender)
    with pytest.raises(SyncTimeout, match=f"process 4711, belongs to user {os.geteuid() + 1}"):
        sender.accept(Deadline.after(BENCH.short_s))
    with pytest.raises(PeerError, match="the sender, process 4711, belongs to user"):
        ShmTransport().receiver(sender.ticket(), 0, BENCH.deadline)
    stranger.close()
    sender.close()


def impostor(door: socket.socket, answer: tuple[object, ...], fds: list[int]) -> None:
    sock, _ = door.accept()
    with sock:
        wire.send_frame(sock, ("challenge", bytes(32)), BENCH.deadline)
        wire.recv_frame(sock, BENCH.deadline)
        wire.send_frame(sock, answer, BENCH.deadline, fds)


@pytest.mark.parametrize("fds", [[], [0]])
def test_a_receiver_takes_no_memory_from_an_impostor(fds: list[int]) -> None:
    ticket = make_sender().ticket()  # dropped at once: its name is free
    gc.collect()
    before = descriptors()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(f"\0{ticket.address}")
        door.listen()
        answer = ("welcome", 4096, 2, bytes(32))
        answering = threading.Thread(target=impostor, args=(door, answer, fds))
        answering.start()
        with pytest.raises(PeerError, match="does not answer as this ticket's sender"):
            ShmTransport().receiver(ticket, 0, BENCH.deadline)
        answering.join()
    assert not descriptors() - before


def test_a_sender_that_takes_no_connections_ends_at_the_deadline() -> None:
    sender = make_sender()
    with pytest.raises(SyncTimeout, match="the sender"):
        ShmTransport().receiver(sender.ticket(), 0, Deadline.after(BENCH.short_s))
    crowd: list[socket.socket] = []
    with suppress(BlockingIOError):  # until the queue is full
        while True:
            crowd.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            crowd[-1].setblocking(False)
            crowd[-1].connect(f"\0{sender.ticket().address}")
    with pytest.raises(SyncTimeout, match="takes no connections"):
        ShmTransport().receiver(sender.ticket(), 0, Deadline.after(BENCH.short_s))
    for sock in crowd:
        sock.close()
    sender.close()


def test_memory_that_cannot_be_had_is_refused_before_the_machine_is_full() -> None:
    gc.collect()
    before = descriptors()
    with pytest.raises(TransportError, match=r"3 slots of 1099511627776 bytes.*lower bucket_bytes or num_slots"):
        ShmTransport().sender(slot_bytes=1 << 40, num_slots=3, receivers=1, generation=1)
    assert not descriptors() - before


def test_shared_memory_is_sealed_and_a_receiver_insists_on_it() -> None:
    fd, slots = memfd.create_slots(4096, 2)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    for size in (4096, 8192):
        with pytest.raises(ProtocolError, match=f"not 3 slots of {size} bytes"):
            memfd.open_slots(fd, size, 3)
    again = memfd.open_slots(fd, 4096, 2)
    slots[1][:] = torch.randint(256, (4096,), dtype=torch.uint8)
    assert torch.equal(again[1], slots[1])
    os.close(fd)
    soft = os.memfd_create("wsync", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(soft, 8192)
    with pytest.raises(ProtocolError, match="not sealed"):
        memfd.open_slots(soft, 4096, 2)
    os.close(soft)


def test_every_page_is_present_before_the_first_sync() -> None:
    fd, slots = memfd.create_slots(4 << 20, 2)
    assert os.fstat(fd).st_blocks * 512 >= 8 << 20
    assert len(slots) == 2
    os.close(fd)


@pytest.mark.parametrize(
    ("frame", "words"),
    [(("release", 5), "released 5"), (("unknown",), "unknown frame"), (3, "where a tuple"), ((), "where a tuple")],
)
def test_a_receiver_that_breaks_the_protocol_is_dropped(frame: object, words: str) -> None:
    sender = make_sender()
    receiver = connected(sender)
    receiver._link.send(frame, BENCH.deadline)  # type: ignore[attr-defined]
    with pytest.raises(PeerError, match=words):
        sender.acquire(BENCH.deadline)
    receiver.close()
    sender.close()
