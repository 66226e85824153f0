"""What ranks tell each other while their group forms, and who ends a wait for those that never come."""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from wsync.deadline import Deadline
from wsync.errors import PeerError, SyncTimeout, TransportError
from wsync.protocols import Ticket
from wsync.testing.bench import Bench, expect
from wsync.testing.samples import plan_of, tiny_tensors
from wsync.transports.board import Board
from wsync.transports.collective import GlooTransport
from wsync.transports.collective_group import Mover, Seat
from wsync.transports.gloo import GlooBackend
from wsync.transports.link import Link
from wsync.transports.listener import connect
from wsync.transports.slots import SlotMemory

PATIENCE_S = 30.0


def nobody(key: str, value: bytes) -> None:
    """There are no others."""


def soon() -> Deadline:
    return Deadline.after(PATIENCE_S)


def test_a_value_is_read_as_soon_as_it_is_posted() -> None:
    board, waiting = Board(nobody), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(board.read, "a", soon(), waiting.set)
        assert waiting.wait(PATIENCE_S)
        board.put("b", b"another")
        board.put("a", b"mine")
        assert read.result(PATIENCE_S) == b"mine"


def test_a_wait_ends_at_the_deadline_and_names_the_key() -> None:
    with pytest.raises(SyncTimeout, match=r"the other ranks of a group \(a\)"):
        Board(nobody).read("a", Deadline.after(0.05), lambda: None)


def test_a_group_of_gloo_that_nobody_joins_is_given_up_at_once() -> None:
    """What gloo itself would wait for is a minute away."""
    seat = Seat(rank=0, size=2, here="127.0.0.1", timeout_s=60.0, board=Board(nobody))
    waiting, errors = threading.Event(), list[Exception]()

    def form(check):  # type: ignore[no-untyped-def]
        def looked() -> None:
            waiting.set()
            check()

        return GlooBackend().form(seat, SlotMemory(()), looked)

    mover = Mover(form, lambda number: None, lambda number: None, errors.append)
    assert waiting.wait(PATIENCE_S)
    mover.stop(PATIENCE_S)
    [error] = errors
    assert isinstance(error, TransportError)
    assert "given up" in str(error)


def receiver_that_never_joins(ticket: Ticket) -> Link:
    link, _ = connect(ticket, 0, soon())
    return link


def test_a_receiver_that_dies_while_the_group_forms_is_named() -> None:
    tensors = tiny_tensors(1, 10)
    plan = plan_of(tensors, 4096)
    sender = GlooTransport().sender(slot_bytes=plan.capacity, num_slots=2, receivers=1, generation=1)
    bench = Bench(make=GlooTransport, processes=False)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(receiver_that_never_joins, sender.ticket())
        sender.accept(soon())
        joining.result(PATIENCE_S).close()
    started = time.monotonic()
    with expect(PeerError, "receiver 0"):
        bench.send(sender, plan, tensors)
    sender.close()
    assert time.monotonic() - started < 20, "the deadline is 60 s"


def test_a_receiver_that_has_released_all_may_leave_before_the_commit_returns() -> None:
    """The last bucket may be read, released and left behind while its commit still tells others."""
    tensors = tiny_tensors(2, 10)
    plan = plan_of(tensors, 64 << 10)
    assert len(plan.buckets) == 1
    bench, transport = Bench(make=GlooTransport, processes=False), GlooTransport()
    sender = transport.sender(slot_bytes=plan.capacity, num_slots=2, receivers=1, generation=1)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(transport.receiver, sender.ticket(), 0, soon())
        sender.accept(soon())
        receiver = connecting.result(PATIENCE_S)

        def read_and_leave() -> None:
            list(receiver.buckets(plan, soon()))
            receiver.close()

        reading = pool.submit(read_and_leave)
        told, end = sender._end.receivers.tell, sender._end

        def tell_and_wait(frame: tuple[object, ...], deadline: Deadline) -> Mapping[int, str]:
            lost = told(frame, deadline)
            if frame[0] == "commit":
                reading.result(PATIENCE_S)
                with end.changed:
                    assert end.changed.wait_for(lambda: end.receivers.gone, PATIENCE_S)
            return lost

        end.receivers.tell = tell_and_wait  # type: ignore[method-assign]
        bench.send(sender, plan, tensors)
        sender.close()
