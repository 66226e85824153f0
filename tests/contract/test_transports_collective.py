"""The collective transport passes the kit over gloo, and what only it promises."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from wsync.deadline import Deadline
from wsync.errors import PeerError, SyncTimeout, TransportError
from wsync.plan import Bucket, Plan
from wsync.protocols import Receiver, Ticket
from wsync.testing.bench import Bench, expect
from wsync.testing.chaos import POISON
from wsync.testing.conformance import TRANSPORT_CHECKS
from wsync.testing.samples import bytes_of, fill_slot, plan_of, random_tensor, tiny_tensors
from wsync.topology import Topology, local_endpoint
from wsync.transports.collective import CollectiveTransport


class Poisoned:
    """A receiver with slots of its own: what was released is poisoned here, as the sender's bench cannot."""

    def __init__(self, inner: Receiver) -> None:
        self._inner = inner
        self.fail, self.close = inner.fail, inner.close

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        for bucket, tensors in self._inner.buckets(plan, deadline):
            yield bucket, tensors
            for tensor in tensors:
                bytes_of(tensor).fill_(POISON)


class Gloo(CollectiveTransport):
    def __init__(self) -> None:
        super().__init__("gloo")

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> Receiver:  # type: ignore[override]
        return Poisoned(super().receiver(ticket, index, deadline))


BENCHES = {
    "processes": Bench(make=Gloo, processes=True),
    "threads": Bench(make=Gloo, processes=False),
}


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES.keys())
def test_conformance(bench: Bench, check: Callable[[Bench], None]) -> None:
    check(bench)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_death_in_the_middle_of_a_message_is_heard_at_once(number: signal.Signals) -> None:
    """The backend would wait for its timeout of a minute. A process that is stopped is given up at the deadline."""
    tensors = {"large": random_tensor((16 << 20,), torch.float32, torch.Generator().manual_seed(1))}
    plan = plan_of(tensors, 64 << 20)
    bench = BENCHES["processes"]
    sender = CollectiveTransport("gloo").sender(slot_bytes=plan.capacity, num_slots=1, receivers=2, generation=1)
    with bench.consumer(sender, plan, index=0) as victim, bench.consumer(sender, plan, index=1) as other:
        sender.accept(bench.deadline)
        for actor in (victim, other):
            actor.hear("connected")
        fill_slot(plan.buckets[0], sender.acquire(bench.deadline), tensors)
        sender.commit(plan.buckets[0])
        with sender._end.changed:  # it has begun: every receiver is in it
            assert sender._end.changed.wait_for(lambda: sender._end.launched == 1, bench.timeout_s)
        victim.signal(number)
        started = time.monotonic()
        if number == signal.SIGKILL:
            with expect(PeerError, "receiver 0"):
                sender.drain(bench.deadline)
        else:
            with expect(SyncTimeout, "receiver(s) [0"):
                sender.drain(Deadline.after(1.0))
            victim.signal(signal.SIGKILL)
        sender.close()
        assert time.monotonic() - started < 10, "the deadline is 60 s"
        said, value = other.hear_any()
        assert said == "synced" or value[0] == "PeerError", value


@pytest.mark.parametrize("backend", ["nccl", "hccl"])
def test_backends_for_devices_are_refused_with_the_reason(backend: str) -> None:
    here = local_endpoint("cpu")
    reason = CollectiveTransport(backend).refuse(Topology(sender=here, receivers=(here,)))
    assert reason is not None
    assert backend in reason


def test_another_host_needs_an_address_that_it_reaches() -> None:
    here = local_endpoint("cpu")
    topology = Topology(sender=here, receivers=(replace(here, host="another"),))
    reason = CollectiveTransport("gloo").refuse(topology)
    assert reason is not None
    assert "host=<address that it reaches>" in reason
    assert CollectiveTransport("gloo", host="10.0.0.9").refuse(topology) is None


def test_a_size_that_differs_is_refused_before_the_broadcast() -> None:
    """Inside gloo it would abort the receiver's process."""
    tensors = tiny_tensors(3, 20)
    plan = plan_of(tensors, 4096)
    smaller = plan_of(tiny_tensors(3, 10), 4096)
    bench = BENCHES["processes"]
    with bench.sender(plan) as sender, bench.consumer(sender, smaller) as actor:
        sender.accept(bench.deadline)
        with expect(PeerError, "bytes was committed"):
            bench.send(sender, plan, tensors)
        actor.hear("connected")
        assert actor.hear("error")[0] == "ProtocolError"


def test_an_address_that_is_not_of_this_host_is_an_error() -> None:
    with pytest.raises(TransportError, match=r"cannot listen on \[203\.0\.113\.1\]:0"):
        CollectiveTransport("gloo", host="203.0.113.1").sender(slot_bytes=64, num_slots=1, receivers=1, generation=1)
