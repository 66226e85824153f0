"""The contract of a transport: slots on the trainer's side, views of what arrived on the worker's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from wsync.deadline import Deadline
from wsync.plan import Bucket, Plan
from wsync.topology import CPU, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """All that a receiver needs to reach its sender. Plain data: it travels in a control frame."""

    transport: str
    """Registered name of the transport."""

    address: str
    """Where to connect: a socket name, or a key in this process."""

    secret: bytes
    """32 random bytes; the receiver proves that it was invited."""

    generation: int
    """Grows with every sender of a session, so that a late receiver of an old one is refused."""


class Sender(Protocol):
    """The trainer's end of a transport: one ring of slots, one or more receivers."""

    by_reference: bool
    """Whether `hand_over` works: the receivers can read this process's tensors in place."""

    @property
    def held_bytes(self) -> int:
        """Memory of the slots that exist, in bytes."""
        ...

    def ticket(self) -> Ticket:
        """What receivers need to connect. The same for all; each adds its own index."""
        ...

    def accept(self, deadline: Deadline) -> None:
        """Wait until every receiver is connected. Raises `SyncTimeout` naming the absent indexes."""
        ...

    def acquire(self, deadline: Deadline) -> torch.Tensor:
        """The next free slot: uint8 `[slot_bytes]`, fixed address. Waits for the slowest receiver.

        Raises `PeerError` if a receiver died or failed, `SyncTimeout`, `ClosedError`, `TransportError` if slots are
        made when first used and there is no memory for one.
        """
        ...

    def commit(self, bucket: Bucket) -> None:
        """Publish the slot that `acquire` gave last as `bucket`. Returns before it is read."""
        ...

    def hand_over(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Publish `tensors` themselves as `bucket`. They must not change before the current stream after `drain`."""
        ...

    def drain(self, deadline: Deadline) -> None:
        """Wait until every receiver has released everything committed. Raises as `acquire`."""
        ...

    def close(self) -> None:
        """Release slots and sockets. Never raises; receivers see the end of the stream."""
        ...


class Receiver(Protocol):
    """The worker's end of a transport."""

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        """Each bucket of `plan` once, in order, with one tensor per `bucket.tensors`.

        The tensors are valid until the iterator is advanced: *advancing is the release*. The consumer must have
        queued all device work on them, on the current stream, and dropped every view by then; that the memory is
        written again only after that work is the transport's affair. `deadline` bounds each single wait anew.
        Raises `PeerError` if the sender is gone, `SyncTimeout`, `ProtocolError` if a bucket is out of order.
        """
        ...

    def fail(self, message: str) -> None:
        """Tell the sender why this receiver gives up. The sender's next wait raises `PeerError` with it."""
        ...

    def close(self) -> None:
        """Drop mappings and sockets. Never raises."""
        ...


class Transport(Protocol):
    """A way to move buckets from one trainer rank to engine workers."""

    name: str
    by_reference: bool
    """Whether its senders can hand over any tensor, without asking first."""

    def refuse(self, topology: Topology) -> str | None:
        """None if this transport can serve `topology`, else the reason, for people."""
        ...

    def sender(
        self, *, slot_bytes: int, num_slots: int, receivers: int, generation: int, device: torch.device = CPU
    ) -> Sender:
        """A sender of `num_slots` slots. Raises `TransportError` if the memory cannot be had.

        Args:
            slot_bytes: bytes of each slot.
            num_slots: how many; 0 if everything will be handed over.
            receivers: how many will connect.
            generation: see `Ticket`.
            device: where the producer's weights are.
        """
        ...

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> Receiver:
        """Connect receiver number `index`. Raises `PeerError` if the sender is gone or refuses, `SyncTimeout`.

        Called with the worker's CUDA device, if its weights are on one, as torch's current device.
        """
        ...


@runtime_checkable
class ReferringTransport(Transport, Protocol):
    """A transport whose senders can hand over all tensors of a plan on a device, if they lie where others can read."""

    def refuse_references(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """None if all receivers can read `tensors`, else the reason, for people."""
        ...
