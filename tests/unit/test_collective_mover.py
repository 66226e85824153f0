"""Broadcasts that begin and never end: who gives them up, when, and what both sides say then."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from wsync.background import Background
from wsync.deadline import Deadline
from wsync.errors import PeerError, SyncTimeout
from wsync.plan import Plan
from wsync.testing.samples import fill_slot, plan_of, tiny_tensors
from wsync.transports import collective_group
from wsync.transports.collective import CollectiveTransport
from wsync.transports.collective_group import Backend, Form, Group, Mover, Seat
from wsync.transports.collective_receiver import CollectiveReceiver
from wsync.transports.collective_sender import CollectiveSender
from wsync.transports.gloo import GlooBackend
from wsync.transports.slots import SlotMemory

PATIENCE_S = 30.0
TENSORS = tiny_tensors(1, 20)


class Stuck:
    """A group whose broadcasts begin. They end when they are told to."""

    def __init__(self) -> None:
        self.ended = False
        self.closed = threading.Event()

    def start(self, slot: int, tensor: torch.Tensor) -> Callable[[], bool]:
        return lambda: self.ended

    def close(self) -> None:
        self.closed.set()


class Told:
    """What a mover told."""

    def __init__(self) -> None:
        self.begun, self.moved, self.failed = threading.Event(), threading.Event(), threading.Event()
        self.errors: list[Exception] = []

    def fail(self, error: Exception) -> None:
        self.errors.append(error)
        self.failed.set()

    def mover(self, form: Form) -> Mover:
        return Mover(form, lambda number: self.begun.set(), lambda number: self.moved.set(), self.fail)


def test_a_broadcast_has_begun_before_it_is_through() -> None:
    group, told = Stuck(), Told()
    mover = told.mover(lambda check: group)
    mover.put(0, 0, torch.empty(1, dtype=torch.uint8))
    assert told.begun.wait(PATIENCE_S)
    assert not told.moved.is_set()
    group.ended = True
    assert told.moved.wait(PATIENCE_S)
    mover.stop(PATIENCE_S)
    assert group.closed.is_set()
    assert told.errors == []


def test_one_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_group, "LEAVE_S", 0.05)
    group, told = Stuck(), Told()
    mover = told.mover(lambda check: group)
    mover.put(0, 0, torch.empty(1, dtype=torch.uint8))
    assert told.begun.wait(PATIENCE_S)
    mover.hurry()
    assert told.failed.wait(PATIENCE_S)
    assert group.closed.is_set(), "what it runs would go on"
    assert "a process of its group is gone" in str(told.errors[0])


def test_a_stop_waits_for_none() -> None:
    group, told = Stuck(), Told()
    mover = told.mover(lambda check: group)
    mover.put(0, 0, torch.empty(1, dtype=torch.uint8))
    assert told.begun.wait(PATIENCE_S)
    mover.stop(PATIENCE_S)
    assert group.closed.is_set()
    assert not told.moved.is_set()


def test_a_group_that_nobody_joins_is_given_up() -> None:
    waiting, told = threading.Event(), Told()

    def form(check: Callable[[], None]) -> Group:
        while True:
            check()
            waiting.set()

    mover = told.mover(form)
    assert waiting.wait(PATIENCE_S)
    mover.stop(PATIENCE_S)
    assert told.failed.is_set()


class StuckBackend(GlooBackend):
    def form(self, seat: Seat, memory: SlotMemory, check: Callable[[], None]) -> Any:
        return Stuck()


class StuckTransport(CollectiveTransport):
    def _backend(self) -> Backend:
        return StuckBackend()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CollectiveSender, CollectiveReceiver, Plan]]:
    """A sender and its receiver, connected."""
    monkeypatch.setattr(collective_group, "LEAVE_S", 0.05)
    plan = plan_of(TENSORS, 64 << 10)
    assert len(plan.buckets) == 1
    transport = StuckTransport("gloo")
    sender = transport.sender(slot_bytes=plan.capacity, num_slots=2, receivers=1, generation=1)
    accepting = Background("accept", lambda: sender.accept(Deadline.after(PATIENCE_S)))
    receiver = transport.receiver(sender.ticket(), 0, Deadline.after(PATIENCE_S))
    accepting.result(Deadline.after(PATIENCE_S))
    fill_slot(plan.buckets[0], sender.acquire(Deadline.after(PATIENCE_S)), TENSORS)
    sender.commit(plan.buckets[0])
    yield sender, receiver, plan
    receiver.close()
    sender.close()


Ends = tuple[CollectiveSender, CollectiveReceiver, Plan]


def read(receiver: CollectiveReceiver, plan: Plan, deadline: Deadline, seen: list[Sequence[torch.Tensor]]) -> None:
    for _, tensors in receiver.buckets(plan, deadline):
        seen.append(tensors)


def test_what_never_arrived_does_not_count_as_read(ends: Ends) -> None:
    """The bucket is handed out when its broadcast has begun; the end of the sync waits for it, and for it only."""
    sender, receiver, plan = ends
    seen: list[Sequence[torch.Tensor]] = []
    with pytest.raises(SyncTimeout, match="the last broadcasts to end"):
        read(receiver, plan, Deadline.after(0.3), seen)
    assert len(seen) == 1
    sender.close()
    with pytest.raises(PeerError, match="sender"):
        receiver._settle(Deadline.after(PATIENCE_S))


def test_a_sender_s_drain_waits_for_its_own_part_and_names_who_is_gone(ends: Ends) -> None:
    sender, receiver, plan = ends
    with pytest.raises(SyncTimeout):
        read(receiver, plan, Deadline.after(0.3), [])
    with pytest.raises(SyncTimeout, match="the last broadcasts to end"):
        sender.drain(Deadline.after(0.3))
    receiver.close()
    with pytest.raises(PeerError, match="receiver 0"):
        sender.drain(Deadline.after(PATIENCE_S))
