"""The sender of a collective: slots, who is ready for which bucket, and what was broadcast."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from wsync.deadline import Deadline
from wsync.errors import ClosedError, TransportError, UnsupportedError
from wsync.plan import Bucket
from wsync.protocols import Ticket
from wsync.transports.board import Board
from wsync.transports.collective_end import FRAME_TIMEOUT_S, End
from wsync.transports.collective_group import Backend, Fact, Mover, Seat
from wsync.transports.link import Link, wait_any
from wsync.transports.listener import Listener, Welcome
from wsync.transports.receivers import Receivers, unknown
from wsync.transports.ring import Ring
from wsync.transports.slots import SlotMemory


class SendingEnd(End):
    def __init__(self, memory: SlotMemory, ring: Ring) -> None:
        super().__init__(memory)
        self.ring = ring
        self.receivers = Receivers()
        self.ready = [0] * len(ring.released)
        self.sizes: list[int] = []
        self.launched = 0
        self.board = Board(self._post)
        self.posts: list[tuple[str, bytes]] = []

    def heard(self) -> bool:
        return self.closed or self.receivers.lost

    def alive(self) -> list[Link]:
        """Links that still say something."""
        return [] if self.closed else self.receivers.speaking()

    def hear(self) -> None:
        """Take in what receivers have said, without waiting."""
        with self.changed:
            self.receivers.hear(self._take, lambda: self.closed)
            self.launch()
            self.hasten()
            self.changed.notify_all()
            posts, self.posts = self.posts, []
        for key, value in posts:
            self.board.post(key, value)  # receivers hear each other through the sender

    def hasten(self) -> None:
        """A broadcast of which a receiver is gone may never end by itself. Call with `changed` held."""
        if self.mover is not None and self.receivers.lost:
            self.mover.hurry()

    def launch(self) -> None:
        """Start the broadcasts that everybody is ready for. Call with `changed` held."""
        while not self.heard() and self.launched < min(len(self.sizes), *self.ready) and self.mover is not None:
            slot = self.launched % len(self.memory.slots)
            self.mover.put(self.launched, slot, self.memory.slots[slot][: self.sizes[self.launched]])
            self.launched += 1

    def check(self, alive: Collection[int]) -> None:
        """Raises what keeps the sender from going on with the receivers `alive`."""
        if self.closed:
            raise ClosedError("this sender was closed")
        self.receivers.check(self.receivers.links if self.broken else alive)
        if self.broken:
            raise TransportError(self.broken)

    def _take(self, index: int, frame: tuple[object, ...]) -> None:
        match frame:
            case ("ready", int(number)) if number == self.ready[index] < len(self.sizes):
                self.ready[index] += 1
            case ("release", int(number)):
                self.ring.release(index, number)
            case ("post", str(key), bytes(value)):
                self.posts.append((key, value))
            case _:
                raise unknown(index, frame)

    def _post(self, key: str, value: bytes) -> None:
        self.receivers.tell(("post", key, value), Deadline.after(FRAME_TIMEOUT_S))  # of losses the links tell


class CollectiveSender:
    """Meets `wsync.Sender`. `close` may be called from any thread, the rest from one at a time."""

    by_reference = False

    def __init__(self, listener: Listener, host: str, backend: Backend, end: SendingEnd, facts: Sequence[Fact]) -> None:
        """Takes over the listener and the slots. `facts`: what receivers compare with their own side."""
        self._listener, self._host, self._backend, self._end = listener, host, backend, end
        slots = end.memory.slots
        self._welcome = Welcome(facts=(slots[0].numel(), len(slots), *facts))

    @property
    def held_bytes(self) -> int:
        """See `wsync.Sender`."""
        return sum(slot.nbytes for slot in self._end.memory.slots)

    def ticket(self) -> Ticket:
        """See `wsync.Sender`."""
        return self._listener.ticket

    def accept(self, deadline: Deadline) -> None:
        """See `wsync.Sender`. `deadline.timeout_s` is the longest time of a broadcast from here on."""
        end, listener = self._end, self._listener
        while True:
            with end.changed:
                end.check(end.receivers.links)
                end.receivers.admit(listener, self._welcome)
            if not listener.absent:
                break
            refused = f" (turned away: {listener.refused})" if listener.refused else ""
            filenos = [*listener.filenos(), *(fd for link in end.alive() for fd in link.filenos())]
            wait_any(filenos, deadline, f"receiver(s) {sorted(listener.absent)} to connect{refused}")
            end.hear()
        listener.close()
        self._meet(deadline.timeout_s)
        end.listen(end.alive, end.hear)

    def acquire(self, deadline: Deadline) -> torch.Tensor:
        """See `wsync.Sender`."""
        end = self._end
        end.hear()
        with end.changed:
            slot, count = end.ring.acquire()
            self._wait(count, end.receivers.links, deadline, lambda: end.begun)
            end.ring.acquired()
            slots = end.memory.slots
        end.memory.before_write(slot)  # a device may keep this thread, and the others must hear why
        return slots[slot]

    def commit(self, bucket: Bucket) -> None:
        """See `wsync.Sender`. Raises `PeerError` if a receiver is gone."""
        end = self._end
        with end.changed:
            end.check(end.receivers.links)
            slot, _ = end.ring.acquire()
        end.memory.after_write(slot)
        with end.changed:
            number = end.ring.commit(bucket)
            end.sizes.append(bucket.nbytes)
        frame = ("commit", number, bucket.index, bucket.nbytes)
        lost = end.receivers.tell(frame, Deadline.after(FRAME_TIMEOUT_S))
        if lost:
            end.hear()
        with end.changed:
            end.receivers.lose(lost)
            end.hasten()
            end.check(end.ring.behind(number + 1))  # whoever has released the last bucket may leave

    def hand_over(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Not here: raises `UnsupportedError`."""
        raise UnsupportedError("a collective cannot hand tensors over: receivers get copies of its slots")

    def drain(self, deadline: Deadline) -> None:
        """See `wsync.Sender`."""
        end = self._end
        with end.changed:
            self._wait(end.ring.published, (), deadline, lambda: end.moved)

    def close(self) -> None:
        """See `wsync.Sender`."""
        end = self._end
        if not end.closed:
            with end.changed:
                end.closed = True
                end.changed.notify_all()
            self._listener.shutdown()
            end.leave(list(end.receivers.links.values()))
            self._listener.close()

    def __del__(self) -> None:
        self.close()

    def _meet(self, timeout_s: float) -> None:
        """Have the receivers form the group, behind the caller's back as here."""
        end = self._end
        size = len(end.receivers.links) + 1
        end.receivers.tell(("form", size, float(timeout_s)), Deadline.after(FRAME_TIMEOUT_S))
        seat = Seat(rank=0, size=size, here=self._host, timeout_s=timeout_s, board=end.board)
        with end.changed:
            end.mover = Mover(partial(self._backend.form, seat, end.memory), end.begin, end.arrive, end.fail)

    def _wait(self, count: int, alive: Collection[int], deadline: Deadline, done: Callable[[], int]) -> None:
        """Until everybody has released `count` buckets, and `done()` of this end too. Call with `changed` held."""
        end = self._end
        while True:
            behind = end.ring.behind(count)
            end.check([*alive, *behind])
            if not behind and done() >= count:
                return
            waiting_for = f"receiver(s) {behind} to release a slot" if behind else "the last broadcasts to end"
            end.changed.wait(deadline.remaining(waiting_for))
