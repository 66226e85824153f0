"""Transports that go wrong on purpose, at a place drawn from a seed, and one that poisons every slot.

Put one around a real transport and run whatever uses transports on top of it. Afterwards `Fault.done` says what was
done, and the only allowed ends are an error or the right bytes.
"""

import os
import random
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from wsync.deadline import Deadline
from wsync.errors import TransportError
from wsync.plan import Bucket, Plan, TensorMeta
from wsync.protocols import Receiver, Sender, Ticket, Transport
from wsync.topology import CPU, Topology

POISON = 0xFF
WORD_BYTES = 8

Kind = Literal["flip", "swap", "drop", "duplicate", "raise", "kill", "delay"]


@dataclass(slots=True, kw_only=True)
class Fault:
    """What goes wrong, once.

    "flip" inverts one bit and "swap" exchanges two unequal 8-byte words of one tensor, after the producer has filled
    the slot. "drop" loses a commit, "duplicate" repeats it, "delay" holds it back until `until` is set. "raise" raises
    `TransportError`, "kill" sends SIGKILL to this process.
    """

    kind: Kind
    bucket: int
    """How many commits (or receipts) pass before it."""

    seed: int = 0
    side: Literal["sender", "receiver"] = "sender"
    """"receiver" goes with "raise" and "kill" only."""

    until: threading.Event | None = None
    done: str = field(default="", init=False)
    """What was done, "" if nothing yet."""


class ChaosTransport:
    """`inner` with one `fault`. Receivers in other processes need it too only for faults on their side."""

    def __init__(self, inner: Transport, fault: Fault) -> None:
        self.name, self.by_reference = inner.name, inner.by_reference and fault.side == "receiver"
        self._inner, self._fault = inner, fault

    def refuse(self, topology: Topology) -> str | None:
        """As the inner transport."""
        return self._inner.refuse(topology)

    def sender(
        self, *, slot_bytes: int, num_slots: int, receivers: int, generation: int, device: torch.device = CPU
    ) -> Sender:
        """The inner sender, going wrong if the fault is on this side."""
        inner = self._inner.sender(
            slot_bytes=slot_bytes, num_slots=num_slots, receivers=receivers, generation=generation, device=device
        )
        return _ChaosSender(inner, self._fault) if self._fault.side == "sender" else inner

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> Receiver:
        """The inner receiver, going wrong if the fault is on this side."""
        inner = self._inner.receiver(ticket, index, deadline)
        return _ChaosReceiver(inner, self._fault) if self._fault.side == "receiver" else inner


class SenderWrapper:
    """A sender that does what `inner` does. Override what should differ."""

    def __init__(self, inner: Sender) -> None:
        self._inner = inner
        self.by_reference = inner.by_reference

    @property
    def held_bytes(self) -> int:
        """As the inner sender; so are all methods."""
        return self._inner.held_bytes

    def ticket(self) -> Ticket:
        return self._inner.ticket()

    def accept(self, deadline: Deadline) -> None:
        self._inner.accept(deadline)

    def acquire(self, deadline: Deadline) -> torch.Tensor:
        return self._inner.acquire(deadline)

    def commit(self, bucket: Bucket) -> None:
        self._inner.commit(bucket)

    def hand_over(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        self._inner.hand_over(bucket, tensors)

    def drain(self, deadline: Deadline) -> None:
        self._inner.drain(deadline)

    def close(self) -> None:
        self._inner.close()


class PoisonedSender(SenderWrapper):
    """Fills every slot with 0xFF once all receivers have released it, so that whoever still reads it is found out."""

    def __init__(self, inner: Sender) -> None:
        super().__init__(inner)
        self._slots: dict[int, torch.Tensor] = {}

    def acquire(self, deadline: Deadline) -> torch.Tensor:
        """A slot full of poison: a producer that leaves bytes out is found out as well."""
        slot = self._inner.acquire(deadline).fill_(POISON)
        self._slots[slot.data_ptr()] = slot
        return slot

    def drain(self, deadline: Deadline) -> None:
        """Poisons all slots that were ever used."""
        self._inner.drain(deadline)
        for slot in self._slots.values():
            slot.fill_(POISON)

    def close(self) -> None:
        """Drops its views of the slots too."""
        self._slots.clear()
        self._inner.close()


class _ChaosSender(SenderWrapper):
    def __init__(self, inner: Sender, fault: Fault) -> None:
        super().__init__(inner)
        self.by_reference = False  # what is handed over is the trainer's own memory, and must not be spoiled
        self._fault = fault
        self._commits = 0
        self._slot: torch.Tensor | None = None
        self._deadline: Deadline | None = None

    def acquire(self, deadline: Deadline) -> torch.Tensor:
        self._deadline = deadline
        self._slot = self._inner.acquire(deadline)
        return self._slot

    def commit(self, bucket: Bucket) -> None:
        assert self._slot is not None
        assert self._deadline is not None
        fault = self._fault
        due = not fault.done and self._commits >= fault.bucket
        self._commits += 1
        if due and fault.kind in ("flip", "swap"):
            fault.done = _spoil(fault, bucket, self._slot)
        elif due:
            fault.done = f"{fault.kind} at bucket {bucket.index}"
            _strike(fault)
        if due and fault.kind == "drop":
            return
        if due and fault.until is not None:
            fault.until.wait(self._deadline.remaining("the test to end the delay"))
        self._inner.commit(bucket)
        if due and fault.kind == "duplicate":
            again = self._inner.acquire(self._deadline.restart())
            again[: bucket.nbytes].copy_(self._slot[: bucket.nbytes])
            self._inner.commit(bucket)


class _ChaosReceiver:
    def __init__(self, inner: Receiver, fault: Fault) -> None:
        self._inner, self._fault = inner, fault
        self._receipts = 0

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        for bucket, tensors in self._inner.buckets(plan, deadline):
            if self._receipts >= self._fault.bucket and not self._fault.done:
                self._fault.done = f"{self._fault.kind} at bucket {bucket.index}"
                _strike(self._fault)
            self._receipts += 1
            yield bucket, tensors

    def fail(self, message: str) -> None:
        self._inner.fail(message)

    def close(self) -> None:
        self._inner.close()


def _strike(fault: Fault) -> None:
    if fault.kind == "raise":
        raise TransportError("raised on purpose by a fault")
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def _spoil(fault: Fault, bucket: Bucket, slot: torch.Tensor) -> str:
    """Flip or swap in one tensor of `bucket`. Returns what was done, "" if none of its tensors gives a chance."""
    rng = random.Random(fault.seed)
    tensors = [meta for meta in bucket.tensors if meta.chunk_nbytes]
    rng.shuffle(tensors)
    for meta in tensors:
        data = slot[meta.offset : meta.offset + meta.chunk_nbytes]
        done = _flip(rng, meta, data) if fault.kind == "flip" else _swap(rng, meta, data)
        if done:
            return done
    return ""


def _flip(rng: random.Random, meta: TensorMeta, data: torch.Tensor) -> str:
    position, bit = rng.randrange(len(data)), rng.randrange(8)
    data[position] ^= 1 << bit
    return f"flipped bit {bit} of byte {meta.chunk_offset + position} of {meta.name}"


def _swap(rng: random.Random, meta: TensorMeta, data: torch.Tensor) -> str:
    words = data[: len(data) // WORD_BYTES * WORD_BYTES].view(torch.int64)
    values = words.tolist()
    first = rng.randrange(len(values)) if values else 0
    unequal = [i for i, value in enumerate(values) if value != values[first]]
    if not unequal:
        return ""
    other = rng.choice(unequal)
    words[first], words[other] = values[other], values[first]
    start = meta.chunk_offset // WORD_BYTES
    return f"swapped words {start + first} and {start + other} of {meta.name}"
