"""A receiver of a collective: slots of its own, filled as soon as the sizes of both sides agree."""

import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from wsync.deadline import Deadline
from wsync.errors import ClosedError, PeerError, ProtocolError, TransportError, WsyncError
from wsync.plan import Bucket, Plan
from wsync.transports.board import Board
from wsync.transports.collective_end import FRAME_TIMEOUT_S, End
from wsync.transports.collective_group import Form, Mover, Seat
from wsync.transports.link import Link
from wsync.transports.ring import check_order
from wsync.transports.slots import SlotMemory, give_up
from wsync.transports.turns import Arrival


class ReceivingEnd(End):
    def __init__(self, link: Link, memory: SlotMemory, rank: int, form: Callable[[Seat], Form]) -> None:
        """`form` gets the seat, whose rank is `rank`, as soon as the sender tells of the group."""
        super().__init__(memory)
        self.link = link
        self.gone = ""
        self.refused: ProtocolError | None = None
        self.base = 0
        self.plan: Plan | None = None
        self.commits: list[tuple[object, ...]] = []
        self.agreed = 0
        self.released = 0
        self.rank, self.form = rank, form
        self.board = Board(self._post)
        self.agreeing = threading.Lock()

    def heard(self) -> bool:
        return self.closed or bool(self.gone)

    def running(self) -> bool:
        """Whether the next bucket is on its way. Call with `changed` held."""
        return self.begun > self.released and not self.broken

    def links(self) -> list[Link]:
        """The link, while it says something."""
        return [] if self.heard() else [self.link]

    def hear(self) -> None:
        """Take in what the sender has said, without waiting."""
        with self.changed:
            try:
                while not self.closed and (frame := self.link.receive()) is not None:
                    self._take(frame)
            except (PeerError, ProtocolError) as error:
                self.gone = str(error)
                if self.mover is not None:
                    self.mover.hurry()
            self.changed.notify_all()
        self.agree()

    def agree(self) -> None:
        """Say ready for what was committed, as far as it is what the plan has, and enter the broadcast."""
        with self.agreeing:  # whoever listens and whoever reads come here, and what they say must be in order
            while (number := self._next()) is not None:
                try:
                    self.link.send(("ready", number), Deadline.after(FRAME_TIMEOUT_S))
                except WsyncError:
                    return  # the link tells why

    def _next(self) -> int | None:
        """The number of a bucket whose broadcast was begun just now."""
        with self.changed:
            plan, number = self.plan, self.agreed
            if plan is None or not self.commits or self.refused or self.heard() or self.mover is None:
                return None
            if number - self.base >= len(plan.buckets):
                return None  # of the next sync
            slots = self.memory.slots
            sequence, index, nbytes = self.commits.pop(0)
            bucket = plan.buckets[number - self.base]
            try:
                check_order(sequence, index, number, bucket, slots[0].numel())
                if nbytes != bucket.nbytes or number - self.released >= len(slots):
                    raise ProtocolError(f"bucket {index} of {nbytes!r} bytes was committed; {bucket.nbytes} fit")
            except ProtocolError as error:
                self.refused = error
                self.changed.notify_all()
                return None
            self.agreed += 1
            slot = number % len(slots)
            self.mover.put(number, slot, slots[slot][: bucket.nbytes])
            return number

    def _take(self, frame: tuple[object, ...]) -> None:
        match frame:
            case ("commit", *commit) if len(commit) == 3 and len(self.commits) < len(self.memory.slots):
                self.commits.append(tuple(commit))
            case ("form", int(size), float(timeout_s)) if self.mover is None:
                seat = Seat(rank=self.rank, size=size, here=self.link.host, timeout_s=timeout_s, board=self.board)
                self.mover = Mover(self.form(seat), self.begin, self.arrive, self.fail)
            case ("post", str(key), bytes(value)):
                self.board.put(key, value)
            case _:
                raise ProtocolError(f"the sender sent an unexpected frame {str(frame[0])[:20]!r}")

    def _post(self, key: str, value: bytes) -> None:
        self.link.send(("post", key, value), Deadline.after(FRAME_TIMEOUT_S))


class CollectiveReceiver:
    """Meets `wsync.Receiver`. `fail` and `close` may be called from any thread, also while `buckets` waits."""

    def __init__(self, end: ReceivingEnd) -> None:
        self._end = end
        end.listen(end.links, end.hear)

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        """See `wsync.Receiver`. The tensors lie in slots of this receiver's own."""
        return filter(None, self.steps(plan, deadline))  # which keeps no hold of what it gave

    def steps(self, plan: Plan, deadline: Deadline) -> Iterator[Arrival | None]:
        """See `SteppingReceiver`."""
        end = self._end
        with end.changed:
            end.base, end.plan = end.released, plan
        end.agree()
        return self._steps(plan, deadline)

    def _steps(self, plan: Plan, deadline: Deadline) -> Iterator[Arrival | None]:
        for bucket in plan.buckets:
            yield bucket, plan.views(bucket, self._receive(bucket, deadline.restart()))
            self._release(deadline.restart())
            yield None
        self._settle(deadline.restart())

    def fail(self, message: str) -> None:
        """See `wsync.Receiver`."""
        give_up(self._end.link, message)

    def close(self) -> None:
        """See `wsync.Receiver`."""
        if not self._end.closed:
            self._end.leave([self._end.link])

    def __del__(self) -> None:
        self.close()

    def _receive(self, bucket: Bucket, deadline: Deadline) -> torch.Tensor:
        """The slot that holds `bucket`."""
        end = self._end
        with end.changed:
            # Of a sender that is gone only what is through is sure to be its bytes.
            while (end.moved if end.gone else end.begun) <= end.released:
                self._check_open()
                if end.refused is not None and end.released == end.agreed:
                    raise end.refused  # what came before it has been read
                if end.gone and not end.running():
                    raise PeerError(end.gone)
                self._check_whole()
                end.changed.wait(deadline.remaining(f"the sender to commit bucket {bucket.index}"))
            self._check_open()
            slots, slot = end.memory.slots, end.released % len(end.memory.slots)
        end.memory.before_read(slot)  # a device may keep this thread, and the others must hear why
        return slots[slot]

    def _release(self, deadline: Deadline) -> None:
        end = self._end
        with end.changed:
            self._check_open()
            number, slot = end.released, end.released % len(end.memory.slots)
        end.memory.after_read(slot)
        with end.changed:
            end.released += 1
        end.link.send(("release", number), deadline)

    def _settle(self, deadline: Deadline) -> None:
        """Work was queued behind broadcasts that had begun. Wait until they are through: else it was not their bytes.

        The sender may have left by now, which is no failure.
        """
        end = self._end
        with end.changed:
            while end.moved < end.released:
                self._check_open()
                self._check_whole()
                end.changed.wait(deadline.remaining("the last broadcasts to end"))

    def _check_open(self) -> None:
        if self._end.closed:
            raise ClosedError("this receiver was closed")

    def _check_whole(self) -> None:
        if self._end.broken:
            raise PeerError(self._end.gone) if self._end.gone else TransportError(self._end.broken)
