"""Several real senders as one receiver: buckets in the order of the plan, each slot released as soon as it was read."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
import torch

from wsync.background import Background
from wsync.deadline import Deadline
from wsync.errors import PeerError, SyncTimeout
from wsync.plan import Plan, TensorSpec
from wsync.transports.collective import GlooTransport
from wsync.transports.collective_receiver import CollectiveReceiver
from wsync.transports.collective_sender import CollectiveSender
from wsync.transports.turns import TurnsReceiver

PATIENCE_S = 20.0
SENDERS = (3, 1)
"""Their ranks."""


def soon() -> Deadline:
    return Deadline.after(PATIENCE_S)


class Rig:
    """One worker with a receiver for each of two senders, which have one slot each, and a plan of six buckets."""

    def __init__(self, stack: ExitStack) -> None:
        specs = [TensorSpec(name=f"t{i}", shape=(1024,), dtype=torch.float32) for i in range(6)]
        self.plan = Plan.pack(specs, 4096).in_turns(SENDERS)
        transport = GlooTransport()
        self.senders: dict[int, CollectiveSender] = {}
        receivers: list[CollectiveReceiver] = []
        for rank in SENDERS:
            sender = transport.sender(slot_bytes=4096, num_slots=1, receivers=1, generation=1)
            self.senders[rank] = sender
            stack.callback(sender.close)
            accepting = Background("a receiver", lambda sender=sender: sender.accept(soon()))  # type: ignore[misc]
            receivers.append(transport.receiver(sender.ticket(), 0, soon()))
            accepting.result(soon())
        self.receiver = TurnsReceiver(receivers)
        stack.callback(self.receiver.close)

    def send(self, index: int, patience_s: float = PATIENCE_S) -> None:
        bucket = self.plan.buckets[index]
        assert bucket.sender is not None
        sender = self.senders[bucket.sender]
        slot = sender.acquire(Deadline.after(patience_s))
        self.plan.views(bucket, slot)[0].fill_(float(index + 1))
        sender.commit(bucket)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as stack:
        yield Rig(stack)


def values(tensors: Sequence[torch.Tensor]) -> set[float]:
    return set(tensors[0].tolist())


def test_a_slot_is_free_when_the_next_bucket_is_asked_for_whoever_sends_that(rig: Rig) -> None:
    arriving = iter(rig.receiver.buckets(rig.plan, soon()))
    rig.send(0)
    _, tensors = next(arriving)
    for index in range(4):
        with pytest.raises(SyncTimeout, match="to release a slot"):
            rig.send(index + 2, 0.1)
        assert values(tensors) == {index + 1.0}, "it was written while it was read"
        del tensors
        asking = Background("the next bucket", lambda: next(arriving))
        rig.send(index + 2)  # before the one for which the worker waits, which the other sender has
        if index == 0:
            assert not asking.done
            rig.send(1)
        bucket, tensors = asking.result(soon())
        assert (bucket.index, values(tensors)) == (index + 1, {index + 2.0})
        del asking


def test_everything_arrives_in_order(rig: Rig) -> None:
    def send_all() -> None:
        for index in range(len(rig.plan.buckets)):
            rig.send(index)

    sending = Background("buckets", send_all)
    got = [(bucket.index, values(tensors)) for bucket, tensors in rig.receiver.buckets(rig.plan, soon())]
    sending.result(soon())
    assert got == [(index, {index + 1.0}) for index in range(6)]
    for sender in rig.senders.values():
        sender.drain(soon())


@pytest.mark.parametrize("gone", SENDERS)
def test_a_sender_that_is_gone_is_named(rig: Rig, gone: int) -> None:
    arriving = iter(rig.receiver.buckets(rig.plan, soon()))
    if gone == SENDERS[1]:
        rig.send(0)
        next(arriving)
    rig.senders[gone].close()
    with pytest.raises(PeerError, match=f"^sender of trainer rank {gone}: "):
        next(arriving)
