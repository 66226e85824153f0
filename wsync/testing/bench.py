"""Where a transport is checked: senders with poisoned slots, receivers beside them, and what to expect of both."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from wsync.deadline import Deadline
from wsync.errors import WsyncError
from wsync.plan import Plan
from wsync.protocols import Sender
from wsync.testing.actors import Actor, Delivery, MakeTransport, Order, consume
from wsync.testing.chaos import PoisonedSender
from wsync.testing.samples import digests_of, fill_slot, plan_of
from wsync.topology import CPU

BUCKET_BYTES = 4096
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where a transport is checked."""

    make: MakeTransport
    """Makes the transport; importable, so that other processes can."""

    processes: bool
    """Receivers in processes of their own instead of threads."""

    device: torch.device = CPU
    """Where the producer's weights are."""

    apart: bool = False
    """Receivers cannot be in the sender's process."""

    receivers: int = 2
    """How many a sender can have here, 1 or 2."""

    timeout_s: float = 60.0
    """Longest wait, in seconds, for anything that is expected to happen."""

    short_s: float = 0.3
    """Patience, in seconds, where a timeout is what is expected."""

    @property
    def deadline(self) -> Deadline:
        """From now."""
        return Deadline.after(self.timeout_s)

    @contextmanager
    def sender(self, plan: Plan, *, receivers: int = 1, num_slots: int = 2) -> Iterator[Sender]:
        """A sender with poisoned slots."""
        inner = self.make().sender(
            slot_bytes=plan.capacity, num_slots=num_slots, receivers=receivers, generation=1, device=self.device
        )
        sender = PoisonedSender(inner)
        try:
            yield sender
        finally:
            sender.close()

    @contextmanager
    def consumer(self, sender: Sender, plan: Plan, **order: Any) -> Iterator[Actor]:
        """A receiver that starts now. Leaving the context closes the sender, so that no receiver waits for it."""
        made = Order(ticket=sender.ticket(), plan=plan, timeout_s=self.timeout_s, **order)
        with Actor(self.processes, self.timeout_s, consume, self.make, made) as actor:
            try:
                yield actor
            finally:
                sender.close()

    @contextmanager
    def consumers(self, sender: Sender, plan: Plan, indexes: Iterable[int], **order: Any) -> Iterator[list[Actor]]:
        """`consumer`, for each of `indexes`."""
        with ExitStack() as stack:
            yield [stack.enter_context(self.consumer(sender, plan, index=index, **order)) for index in indexes]

    def delivery(self, *, seed: int, leave_at: int, leave: str) -> Delivery:
        """The order of a producer that runs beside the test and leaves; see `Delivery`."""
        return Delivery(
            seed=seed,
            bucket_bytes=BUCKET_BYTES,
            leave_at=leave_at,
            leave=leave,
            timeout_s=self.timeout_s,
            device=self.device,
        )

    def send(self, sender: Sender, plan: Plan, tensors: Tensors) -> None:
        """One sync, up to the last release."""
        for bucket in plan.buckets:
            fill_slot(bucket, sender.acquire(self.deadline), tensors)
            sender.commit(bucket)
        sender.drain(self.deadline)

    def deliver(self, tensors: Tensors, bucket_bytes: int = BUCKET_BYTES, receivers: int = 1, **order: Any) -> None:
        """One sync on a sender of its own, every byte checked at every receiver."""
        plan = plan_of(tensors, bucket_bytes)
        with (
            self.sender(plan, receivers=receivers) as sender,
            self.consumers(sender, plan, range(receivers), **order) as actors,
        ):
            sender.accept(self.deadline)
            self.send(sender, plan, tensors)
            for actor in actors:
                actor.hear("connected")
                check_equal(actor.hear("synced"), tensors)
                actor.hear("done")


def check_equal(digests: Mapping[str, str], tensors: Tensors) -> None:
    """Raises `AssertionError` naming the tensors whose bytes are not those that were sent."""
    expected = digests_of(tensors)
    wrong = [name for name in expected if digests.get(name) != expected[name]]
    assert not wrong, f"{len(wrong)} of {len(expected)} tensors arrived with wrong bytes: {wrong[:5]}"


@dataclass(slots=True)
class Caught:
    """What `expect` caught."""

    error: WsyncError | None = None


@contextmanager
def expect(kind: type[WsyncError], *words: str) -> Iterator[Caught]:
    """Raises `AssertionError` unless the block raises `kind` with a message that has all of `words`."""
    caught = Caught()
    try:
        yield caught
    except kind as error:
        caught.error = error
    if caught.error is None:
        raise AssertionError(f"{kind.__name__} was not raised")
    missing = [word for word in words if word not in str(caught.error)]
    if missing:
        raise AssertionError(f"{missing} not in the message of {caught.error!r}")
