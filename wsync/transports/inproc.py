"""Threads of one process: slots are plain tensors, and tensors can be handed over where they lie.

    sender --(sequence, bucket, tensors)--> channel --> every receiver
           <------- released counts -------

One condition variable per channel; whoever leaves wakes everyone else.
"""

import hmac
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from wsync.deadline import Deadline
from wsync.device_work import Events, order_after, queued
from wsync.errors import ClosedError, PeerError, ProtocolError, TransportError
from wsync.plan import Bucket, Plan
from wsync.protocols import Ticket
from wsync.topology import CPU, Topology
from wsync.traits import all_on_cpu, cuda_devices
from wsync.transports.ring import Ring, check_order, failed, failure_of
from wsync.views import Views

_channels: "weakref.WeakValueDictionary[str, _Channel]" = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class _Item:
    """A bucket that was published."""

    index: int
    payload: torch.Tensor | Views
    """The slot that holds it, or its tensors where they lie."""

    written: Events
    """What the publishing thread had queued by then, on the devices that the bucket lies on."""


class _Channel:
    """What both ends share. `changed` guards every other attribute."""

    def __init__(self, ticket: Ticket, ring: Ring, slot_bytes: int) -> None:
        self.changed = threading.Condition()
        self.ticket, self.ring, self.slot_bytes = ticket, ring, slot_bytes
        self.items: dict[int, _Item] = {}
        self.read: dict[int, Events] = {}
        self.connected: set[int] = set()
        self.left: set[int] = set()
        self.failure: tuple[int, str, str] | None = None
        self.sender_closed = False

    def wait(self, done: Callable[[], bool], deadline: Deadline, waiting_for: Callable[[], str]) -> None:
        """Wait until `done()`, which may raise. Call with `changed` held."""
        while not done():
            self.changed.wait(deadline.remaining(waiting_for()))

    def release(self, receiver: int, read: Events) -> None:
        """Receiver `receiver` has queued all that reads its present item. What all are done with is dropped."""
        with self.changed:
            self.read[receiver] = read
            if self.sender_closed:
                raise PeerError("the sender closed while a bucket was being read")
            self.ring.release(receiver, self.ring.released[receiver])
            kept = min(self.ring.released)
            for sequence in [number for number in self.items if number < kept]:
                del self.items[sequence]
            self.changed.notify_all()

    def order(self) -> None:
        """What this thread queues from now on comes after all that was queued to read. Call with `changed` held."""
        for events in self.read.values():
            order_after(events)

    def leave(self, receiver: int) -> None:
        """Receiver `receiver` closed."""
        with self.changed:
            self.left.add(receiver)
            self.changed.notify_all()

    def end(self, slots: list[torch.Tensor]) -> None:
        """The sender closed. Receivers read nothing more than they have queued."""
        _channels.pop(self.ticket.address, None)
        with self.changed:
            self.sender_closed = True
            self.items.clear()
            slots.clear()
            self.changed.notify_all()


class InprocSender:
    """Meets `wsync.Sender`. Its methods may be called from any one thread at a time, `close` from any."""

    by_reference = True

    def __init__(self, slot_bytes: int, num_slots: int, receivers: int, generation: int, device: torch.device) -> None:
        # Made when first acquired: a session that hands everything over never pays for them.
        self._slots: list[torch.Tensor] = []
        ticket = Ticket(
            transport="inproc",
            address=secrets.token_hex(16),
            secret=secrets.token_bytes(32),
            generation=generation,
        )
        self._channel = _Channel(ticket, Ring(slot_bytes, num_slots, receivers), slot_bytes)
        self._receivers, self._device = receivers, device
        self._known: dict[int, tuple[object, Collection[torch.device]]] = {}
        self._close = weakref.finalize(self, self._channel.end, self._slots)
        _channels[ticket.address] = self._channel

    @property
    def held_bytes(self) -> int:
        """See `wsync.Sender`."""
        return sum(slot.nbytes for slot in self._slots)

    def ticket(self) -> Ticket:
        """See `wsync.Sender`."""
        return self._channel.ticket

    def accept(self, deadline: Deadline) -> None:
        """See `wsync.Sender`."""
        channel = self._channel

        def absent() -> list[int]:
            return sorted(set(range(self._receivers)) - channel.connected)

        def done() -> bool:
            self._check(alive=range(self._receivers))
            return not absent()

        with channel.changed:
            channel.wait(done, deadline, lambda: f"receiver(s) {absent()} to connect")

    def acquire(self, deadline: Deadline) -> torch.Tensor:
        """See `wsync.Sender`."""
        with self._channel.changed:
            slot, count = self._channel.ring.acquire()
            self._wait(count, range(self._receivers), deadline)
            self._channel.order()
            if slot == len(self._slots):
                self._slots.append(_allocate(self._channel.slot_bytes, self._device))
            self._channel.ring.acquired()
            return self._slots[slot]

    def commit(self, bucket: Bucket) -> None:
        """See `wsync.Sender`."""
        with self._channel.changed:
            self._check(alive=range(self._receivers))
            slot, _ = self._channel.ring.acquire()
            self._publish(self._channel.ring.commit(bucket), bucket, self._slots[slot])

    def hand_over(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """See `wsync.Sender`. Takes no slot and never waits."""
        if len(tensors) != len(bucket.tensors):
            raise ProtocolError(
                f"bucket {bucket.index} has {len(bucket.tensors)} tensors; {len(tensors)} were handed over"
            )
        with self._channel.changed:
            self._check(alive=range(self._receivers))
            self._publish(self._channel.ring.hand_over(), bucket, Views.of(tensors))

    def drain(self, deadline: Deadline) -> None:
        """See `wsync.Sender`."""
        with self._channel.changed:
            self._wait(self._channel.ring.published, (), deadline)
            self._channel.order()

    def close(self) -> None:
        """See `wsync.Sender`."""
        self._close()

    def _wait(self, count: int, alive: Sequence[int], deadline: Deadline) -> None:
        ring = self._channel.ring

        def done() -> bool:
            behind = ring.behind(count)
            self._check(alive=[*alive, *behind])
            return not behind

        self._channel.wait(done, deadline, lambda: f"receiver(s) {ring.behind(count)} to release {count} bucket(s)")

    def _check(self, alive: Sequence[int]) -> None:
        channel = self._channel
        if channel.sender_closed:
            raise ClosedError("this sender was closed")
        if channel.failure is not None:
            raise failed(*channel.failure)
        gone = sorted(channel.left.intersection(alive))
        if gone:
            raise PeerError(f"receiver(s) {gone} closed")

    def _publish(self, sequence: int, bucket: Bucket, payload: torch.Tensor | Views) -> None:
        devices = self._devices(bucket, payload) if isinstance(payload, Views) else _cuda_devices([payload])
        self._channel.items[sequence] = _Item(bucket.index, payload, queued(devices))
        self._channel.changed.notify_all()

    def _devices(self, bucket: Bucket, views: Views) -> Collection[torch.device]:
        key, devices = self._known.get(bucket.index, (None, ()))
        if key is None or key is not views.key:
            devices = _cuda_devices(views.memories)
            self._known[bucket.index] = views.key, devices
        return devices


def _cuda_devices(memories: Sequence[torch.Tensor]) -> Collection[torch.device]:
    return () if all_on_cpu(memories) else cuda_devices(memories)


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise TransportError(
            f"cannot allocate a slot of {nbytes} bytes on {device}: {error}; lower bucket_bytes"
        ) from error


class InprocReceiver:
    """Meets `wsync.Receiver`. `fail` and `close` may be called from any thread, also while `buckets` waits."""

    def __init__(self, channel: _Channel, index: int) -> None:
        self._channel, self._index = channel, index
        self._close = weakref.finalize(self, channel.leave, index)

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        """See `wsync.Receiver`. Tensors that were handed over are the sender's own: read them only."""
        devices = set[torch.device]()
        for bucket in plan.buckets:
            item = self._next(bucket, deadline.restart())
            devices.update(device for device, _ in item.written)
            yield bucket, plan.views(bucket, item.payload) if isinstance(item.payload, torch.Tensor) else item.payload
            del item
            self._channel.release(self._index, queued(devices))

    def fail(self, message: str) -> None:
        """See `wsync.Receiver`."""
        with self._channel.changed:
            if self._channel.failure is None and self._index not in self._channel.left:
                self._channel.failure = (self._index, *failure_of(message))
                self._channel.changed.notify_all()

    def close(self) -> None:
        """See `wsync.Receiver`."""
        self._close()

    def _next(self, bucket: Bucket, deadline: Deadline) -> _Item:
        channel = self._channel
        with channel.changed:
            sequence = channel.ring.released[self._index]

            def done() -> bool:
                if self._index in channel.left:
                    raise ClosedError("this receiver was closed")
                if channel.sender_closed:
                    raise PeerError(f"the sender closed before bucket {bucket.index} was read")
                return sequence in channel.items

            channel.wait(done, deadline, lambda: f"the sender to commit bucket {bucket.index}")
            item = channel.items[sequence]
            in_slot = isinstance(item.payload, torch.Tensor)
            check_order(sequence, item.index, sequence, bucket, channel.slot_bytes if in_slot else bucket.nbytes)
        order_after(item.written)
        return item


class InprocTransport:
    """Between threads of one process."""

    name = "inproc"
    by_reference = True

    def refuse_references(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """See `wsync.Transport`. Threads see all memory of their process."""
        return None

    def refuse(self, topology: Topology) -> str | None:
        """See `wsync.Transport`."""
        elsewhere = [str(worker) for worker in topology.receivers if worker.process != topology.sender.process]
        return f"the trainer is {topology.sender}, a worker is {elsewhere[0]}: not one process" if elsewhere else None

    def sender(
        self, *, slot_bytes: int, num_slots: int, receivers: int, generation: int, device: torch.device = CPU
    ) -> InprocSender:
        """See `wsync.Transport`."""
        return InprocSender(slot_bytes, num_slots, receivers, generation, device)

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> InprocReceiver:
        """See `wsync.Transport`. Never waits."""
        deadline.remaining(f"receiver {index} to connect")
        channel = _channels.get(ticket.address)
        if channel is None:
            raise PeerError("no sender of this process has this ticket's address: it closed, or lives elsewhere")
        with channel.changed:
            reason = _reason_to_refuse(channel, ticket, index)
            if reason is not None:
                raise PeerError(f"the sender refuses receiver {index}: {reason}")
            channel.connected.add(index)
            channel.changed.notify_all()
        return InprocReceiver(channel, index)


def _reason_to_refuse(channel: _Channel, ticket: Ticket, index: int) -> str | None:
    if not hmac.compare_digest(ticket.secret, channel.ticket.secret):
        return "the secret is wrong"
    if ticket.generation != channel.ticket.generation:
        return f"the ticket is of generation {ticket.generation}, the sender of {channel.ticket.generation}"
    if channel.sender_closed:
        return "it is closed"
    if not 0 <= index < len(channel.ring.released):
        return f"it serves receivers 0 to {len(channel.ring.released) - 1}"
    return "this receiver is connected already" if index in channel.connected else None
