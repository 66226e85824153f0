"""A ring of slots that processes of one host share, whatever memory the slots lie in.

    sender --commit(number, bucket)--> every receiver      over one Unix socket each
           --refer(number, bucket)--->
           <--release(number)---------
           <--fail(message, traceback)

Bytes are written once by the producer and read in place by every receiver, or read where the trainer has them: see
`wsync.transports.references`. Frames are a few bytes, whatever a bucket holds. Death of either side shows on the socket
at once; whoever is stopped is given up at the deadline.
"""

import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

import torch

from wsync.deadline import Deadline
from wsync.errors import ClosedError, ProtocolError, UnsupportedError, WsyncError
from wsync.plan import Bucket, Plan
from wsync.protocols import Ticket
from wsync.transports.link import Link, wait_any
from wsync.transports.listener import Listener, Welcome
from wsync.transports.receivers import Receivers, unknown
from wsync.transports.references import Descriptions, Exporter, Importer, Openings
from wsync.transports.ring import Ring, check_order, failure_of
from wsync.views import Views

BY_REFERENCE = -1
"""Stands for the place of a bucket that was handed over, where a slot is asked for."""

_FRAME_TIMEOUT_S = 10.0
_FAIL_TIMEOUT_S = 1.0


class SlotMemory:
    """The slots as one of the processes sees them, and what orders its device's work with that of the others.

    Host memory needs no order beyond that of the frames. Slots are counted from 0; `BY_REFERENCE` is a slot in which
    the trainer's own tensors lie.

    Attributes:
        slots: uint8 `[slot_bytes]` each.
    """

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        self.slots = slots

    def before_write(self, slot: int) -> None:
        """Every receiver has released `slot`; work that this thread queues from now on comes after its reads."""

    def after_write(self, slot: int) -> None:
        """What this thread has queued so far fills `slot`."""

    def before_read(self, slot: int) -> None:
        """The sender has committed `slot`; work that this thread queues from now on comes after its writes."""

    def after_read(self, slot: int) -> None:
        """What this thread has queued so far is all that reads `slot`."""

    def absent(self, receivers: Collection[int]) -> list[int]:
        """Those of `receivers` that have yet to say that they see the slots, in memory where they must."""
        return []

    def meet(self, receiver: int, facts: Sequence[object]) -> None:
        """What a receiver says of its view of the slots. Raises `ProtocolError` if that is not what it should be."""
        raise ProtocolError(f"receiver {receiver} has something to say about slots in host memory")

    def release(self, memory: object) -> bool:
        """Whether nothing reads the slots, or `memory`, any more; if something may, they are kept from now on."""
        return True

    def close(self) -> None:
        """Drop the slots. Tensors that are still referenced stay valid until they are dropped."""
        self.slots = ()


class SlotSender:
    """Meets `wsync.Sender`. `close` may be called from any thread, the rest from one at a time."""

    def __init__(
        self, listener: Listener, ring: Ring, welcome: Welcome, memory: SlotMemory, exporter: Exporter | None = None
    ) -> None:
        """Takes over the listener, the memory and the descriptor in `welcome`. Without `exporter` nothing is handed
        over."""
        self._listener, self._ring, self._welcome, self._memory = listener, ring, welcome, memory
        self._descriptions = None if exporter is None else Descriptions(exporter)
        self.by_reference = exporter is not None
        self._handed = list[Views]()
        self._receivers = Receivers()
        self._closed = False
        self._using = threading.RLock()

    @property
    def held_bytes(self) -> int:
        """See `wsync.Sender`."""
        return sum(slot.nbytes for slot in self._memory.slots)

    def ticket(self) -> Ticket:
        """See `wsync.Sender`."""
        return self._listener.ticket

    def accept(self, deadline: Deadline) -> None:
        """See `wsync.Sender`."""
        listener = self._listener
        with self._using:
            while True:
                self._check(alive=self._receivers.links)
                self._receivers.admit(listener, self._welcome)
                absent = sorted({*listener.absent, *self._memory.absent(self._receivers.links)})
                if not absent:
                    listener.close()
                    return
                refused = f" (turned away: {listener.refused})" if listener.refused else ""
                self._listen(deadline, f"receiver(s) {absent} to connect{refused}", listener.filenos())

    def acquire(self, deadline: Deadline) -> torch.Tensor:
        """See `wsync.Sender`."""
        with self._using:
            slot, count = self._ring.acquire()
            self._hear()
            self._wait(count, self._receivers.links, deadline)
            self._ring.acquired()
            self._memory.before_write(slot)
            return self._memory.slots[slot]

    def commit(self, bucket: Bucket) -> None:
        """See `wsync.Sender`. Raises `PeerError` if a receiver is gone."""
        with self._using:
            self._check(alive=self._receivers.links)
            slot, _ = self._ring.acquire()
            frame = ("commit", self._ring.commit(bucket), bucket.index)
            self._memory.after_write(slot)
            self._tell(frame)

    def hand_over(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """See `wsync.Sender`. Raises `TransportError` if they lie in memory that no other process can open."""
        if self._descriptions is None:
            raise UnsupportedError("this transport cannot hand tensors over: receivers see its slots only")
        if len(tensors) != len(bucket.tensors):
            raise ProtocolError(
                f"bucket {bucket.index} has {len(bucket.tensors)} tensors; {len(tensors)} were handed over"
            )
        with self._using:
            self._check(alive=self._receivers.links)
            views = Views.of(tensors)
            description = self._descriptions.frames(bucket, views)
            self._handed.append(views)  # copies among them live as long as somebody reads them
            self._memory.after_write(BY_REFERENCE)
            self._tell(*description, ("refer", self._ring.hand_over(), bucket.index))

    def drain(self, deadline: Deadline) -> None:
        """See `wsync.Sender`."""
        with self._using:
            self._wait(self._ring.published, (), deadline)
            if self._handed:
                self._memory.before_write(BY_REFERENCE)
            self._handed.clear()

    def close(self) -> None:
        """See `wsync.Sender`. Slots that are still referenced stay mapped until they are dropped."""
        if self._closed:
            return
        self._closed = True
        self._listener.shutdown()
        for link in list(self._receivers.links.values()):
            link.shutdown()
        with self._using:
            self._listener.close()
            for link in self._receivers.links.values():
                link.close()
            if self._welcome.fd is not None:
                os.close(self._welcome.fd)
            self._memory.close()
            self._handed.clear()

    def __del__(self) -> None:
        self.close()

    def _tell(self, *frames: tuple[object, ...]) -> None:
        receivers = self._receivers
        for frame in frames:
            if lost := receivers.tell(frame, Deadline.after(_FRAME_TIMEOUT_S)):
                self._hear()
                receivers.lose(lost)
            self._check(alive=receivers.links)

    def _wait(self, count: int, alive: Collection[int], deadline: Deadline) -> None:
        while True:
            behind = self._ring.behind(count)
            self._check(alive=[*alive, *behind])
            if not behind:
                return
            self._listen(deadline, f"receiver(s) {behind} to release a slot")

    def _listen(self, deadline: Deadline, waiting_for: str, more: Sequence[int] = ()) -> None:
        """Wait until any receiver says something or leaves, and take it in."""
        filenos = [fd for link in self._receivers.speaking() for fd in link.filenos()]
        wait_any([*filenos, *more], deadline, waiting_for)
        self._hear()

    def _hear(self) -> None:
        """Take in what receivers have said, without waiting."""
        self._receivers.hear(self._take, lambda: self._closed)

    def _take(self, index: int, frame: tuple[object, ...]) -> None:
        match frame:
            case ("release", int(sequence)):
                self._ring.release(index, sequence)
            case ("slots", *facts):
                self._memory.meet(index, facts)
            case _:
                raise unknown(index, frame)

    def _check(self, alive: Collection[int]) -> None:
        if self._closed:
            raise ClosedError("this sender was closed")
        self._receivers.check(alive)


def give_up(link: Link, message: str) -> None:
    """Tell the sender why a receiver ends, with the traceback of what is being handled. Never raises."""
    with suppress(WsyncError):
        link.send(("fail", *failure_of(message)), Deadline.after(_FAIL_TIMEOUT_S))


class SlotReceiver:
    """Meets `wsync.Receiver`. `fail` and `close` may be called from any thread, also while `buckets` waits."""

    def __init__(self, link: Link, memory: SlotMemory, importer: Importer | None = None) -> None:
        """Takes over the link and the memory. Without `importer` nothing is taken that was handed over."""
        self._link, self._memory = link, memory
        self._openings = None if importer is None else Openings(importer)
        self._next = 0
        self._slots_read = 0
        self._closed = False
        self._using = threading.RLock()

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        """See `wsync.Receiver`. Every receiver of a sender maps the same memory: read the tensors only."""
        for bucket in plan.buckets:
            slot = self._receive(bucket, deadline.restart())
            yield bucket, self._views(plan, bucket, slot)
            self._release(slot, deadline.restart())

    def fail(self, message: str) -> None:
        """See `wsync.Receiver`."""
        give_up(self._link, message)

    def close(self) -> None:
        """See `wsync.Receiver`. Tensors that are still referenced stay mapped until they are dropped."""
        if self._closed:
            return
        self._closed = True
        self._link.shutdown()
        with self._using:
            self._link.close()
            if not self._memory.release((self._memory, self._openings)):
                return
            self._memory.close()
            if self._openings is not None:
                self._openings.close()

    def __del__(self) -> None:
        self.close()

    def _receive(self, bucket: Bucket, deadline: Deadline) -> int:
        """The slot that holds `bucket`."""
        with self._using:
            while True:
                if self._closed:
                    raise ClosedError("this receiver was closed")
                frame = self._link.receive()
                if frame is None:
                    wait_any(self._link.filenos(), deadline, f"the sender to commit bucket {bucket.index}")
                elif self._openings is None or not self._openings.hear(frame):
                    break
            slots = self._memory.slots
            match frame:
                case ("commit", sequence, index) if slots:
                    check_order(sequence, index, self._next, bucket, slots[0].numel())
                    slot = self._slots_read % len(slots)
                    self._slots_read += 1
                case ("refer", sequence, index) if self._openings is not None:
                    check_order(sequence, index, self._next, bucket, bucket.nbytes)
                    slot = BY_REFERENCE
                case _:
                    raise ProtocolError(f"the sender sent an unknown frame {str(frame[0])[:20]!r}")
            self._memory.before_read(slot)
            return slot

    def _views(self, plan: Plan, bucket: Bucket, slot: int) -> Views:
        if slot == BY_REFERENCE:
            assert self._openings is not None
            return self._openings.views(bucket)
        return plan.views(bucket, self._memory.slots[slot])

    def _release(self, slot: int, deadline: Deadline) -> None:
        with self._using:
            if self._closed:
                raise ClosedError("this receiver was closed")
            self._memory.after_read(slot)
            self._link.send(("release", self._next), deadline)
            self._next += 1
