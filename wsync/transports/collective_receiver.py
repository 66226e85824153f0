"""A receiver of a collective: slots of its own, filled as soon as the sizes of both sides agree."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch

from wsync.deadline import Deadline
from wsync.errors import ClosedError, PeerError, ProtocolError, TransportError, WsyncError
from wsync.plan import Bucket, Plan
from wsync.transports.collective_end import FRAME_TIMEOUT_S, End
from wsync.transports.collective_group import Broadcast, Mover
from wsync.transports.link import Link
from wsync.transports.ring import check_order, failure_of

_FAIL_TIMEOUT_S = 1.0


class ReceivingEnd(End):
    def __init__(self, link: Link, slots: Sequence[torch.Tensor]) -> None:
        super().__init__(slots)
        self.link = link
        self.gone = ""
        self.refused: ProtocolError | None = None
        self.base = 0
        self.plan: Plan | None = None
        self.commits: list[tuple[object, ...]] = []
        self.agreed = 0
        self.moved = 0
        self.released = 0
        self.form: Callable[[int, int, float], Broadcast] | None = None

    def heard(self) -> bool:
        return self.closed or bool(self.gone)

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
            self.changed.notify_all()
        self.agree()

    def agree(self) -> None:
        """Say ready for what was committed, as far as it is what the plan has, and enter the broadcast."""
        while (number := self._next()) is not None:
            try:
                self.link.send(("ready", number), Deadline.after(FRAME_TIMEOUT_S))
            except WsyncError:
                return  # the link tells why

    def arrived(self, number: int) -> None:
        """Broadcast `number` is through."""
        with self.changed:
            self.moved = number + 1
            self.changed.notify_all()

    def _next(self) -> int | None:
        """The number of a bucket whose broadcast was begun just now."""
        with self.changed:
            plan, number = self.plan, self.agreed
            if plan is None or not self.commits or self.refused or self.closed or self.mover is None:
                return None
            if number - self.base >= len(plan.buckets):
                return None  # of the next sync
            sequence, index, nbytes = self.commits.pop(0)
            bucket = plan.buckets[number - self.base]
            try:
                check_order(sequence, index, number, bucket, self.slots[0].numel())
                if nbytes != bucket.nbytes or number - self.released >= len(self.slots):
                    raise ProtocolError(f"bucket {index} of {nbytes!r} bytes was committed; {bucket.nbytes} fit")
            except ProtocolError as error:
                self.refused = error
                self.changed.notify_all()
                return None
            self.agreed += 1
            self.mover.put(number, self.slots[number % len(self.slots)][: bucket.nbytes])
            return number

    def _take(self, frame: tuple[object, ...]) -> None:
        match frame:
            case ("commit", *commit) if len(commit) == 3 and len(self.commits) < len(self.slots):
                self.commits.append(tuple(commit))
            case ("form", int(port), int(size), float(timeout_s)) if self.mover is None and self.form is not None:
                self.mover = Mover(partial(self.form, port, size, timeout_s), self.arrived, self.fail)
            case _:
                raise ProtocolError(f"the sender sent an unexpected frame {str(frame[0])[:20]!r}")


class CollectiveReceiver:
    """Meets `wsync.Receiver`. `fail` and `close` may be called from any thread, also while `buckets` waits."""

    def __init__(self, end: ReceivingEnd) -> None:
        self._end = end
        end.listen(end.links, end.hear)

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        """See `wsync.Receiver`. The tensors lie in slots of this receiver's own."""
        end = self._end
        with end.changed:
            end.base, end.plan = end.released, plan
        end.agree()
        for bucket in plan.buckets:
            yield bucket, plan.views(bucket, self._receive(bucket, deadline.restart()))
            self._release(deadline.restart())

    def fail(self, message: str) -> None:
        """See `wsync.Receiver`."""
        with suppress(WsyncError):
            self._end.link.send(("fail", *failure_of(message)), Deadline.after(_FAIL_TIMEOUT_S))

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
            while end.moved <= end.released:
                if end.closed:
                    raise ClosedError("this receiver was closed")
                if end.refused is not None and end.released == end.agreed:
                    raise end.refused  # what came before it has been read
                if end.gone:
                    raise PeerError(end.gone)
                if end.broken:
                    raise TransportError(end.broken)
                end.changed.wait(deadline.remaining(f"the sender to commit bucket {bucket.index}"))
            if end.closed:
                raise ClosedError("this receiver was closed")
            return end.slots[end.released % len(end.slots)]

    def _release(self, deadline: Deadline) -> None:
        end = self._end
        with end.changed:
            if end.closed:
                raise ClosedError("this receiver was closed")
            number = end.released
            end.released += 1
        end.link.send(("release", number), deadline)
