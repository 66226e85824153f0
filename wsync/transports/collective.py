"""Between processes of any hosts: buckets are broadcast in a process group of wsync's own, sender and receivers.

    sender --form(port of the store)-------> every receiver     control: one TCP link each
           --commit(number, bucket, size)-->
           <--ready(number)----------------                     the size fits, the slot is free
           ===broadcast===================>                     data: the group
           <--release(number)--------------
           <--fail(message, traceback)

Nobody enters a broadcast before all have agreed on its size: a receiver whose buffer is too small would be aborted by
the backend. Each end has its slots, so that a bucket travels while the one before is loaded. Death of either side shows
on the link at once, whatever the backend does then; the next sender forms a group of its own.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist

from wsync.deadline import Deadline
from wsync.errors import ClosedError, PeerError, ProtocolError, TransportError, UnsupportedError, WsyncError
from wsync.plan import Bucket, Plan
from wsync.protocols import Ticket
from wsync.topology import Topology
from wsync.transports.collective_group import Broadcast, Mover, gloo_broadcast, host_store, join_store
from wsync.transports.dial import address_parts
from wsync.transports.link import Link, address_of, wait_any
from wsync.transports.listener import Listener, Welcome, connect, listen_at, new_ticket
from wsync.transports.ring import Ring, check_order, failed, failure_of

_FOREVER_S = 1e9
_FRAME_TIMEOUT_S = 10.0
_FAIL_TIMEOUT_S = 1.0
_LEAVE_S = 2.0
"""How long, in seconds, a thread that may be stuck in the backend is waited for; and how long the backend's error
waits for the reason, which comes over the link."""


class _End:
    """What both ends share. Threads hold this, not the object that its user holds.

    `changed` guards every attribute; frames go out without it.
    """

    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        self.changed = threading.Condition()
        self.slots = slots
        self.closed = False
        self.broken = ""
        self.mover: Mover | None = None
        self.listener: threading.Thread | None = None

    def listen(self, links: Callable[[], Sequence[Link]], hear: Callable[[], None]) -> None:
        """On a thread of its own: call `hear` whenever one of `links` has something to say, until there are none."""

        def run() -> None:
            while open_links := links():
                wait_any([fd for link in open_links for fd in link.filenos()], Deadline.after(_FOREVER_S), "frames")
                hear()

        self.listener = threading.Thread(target=run, name="wsync collective", daemon=True)
        self.listener.start()

    def heard(self) -> bool:
        """Whether the link has told why the backend fails. Call with `changed` held."""
        return self.closed

    def fail(self, error: Exception) -> None:
        """The backend gave up. The reason, a peer that died say, is a matter of moments."""
        with self.changed:
            self.changed.wait_for(self.heard, _LEAVE_S)
            self.broken = self.broken or f"the transfer broke: {error}"
            self.changed.notify_all()

    def leave(self, links: Sequence[Link]) -> None:
        """End the threads, as far as they can be ended, and release everything."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for link in links:
            link.shutdown()
        if self.listener is not None:
            self.listener.join(_LEAVE_S)
        if self.mover is not None:
            self.mover.stop(_LEAVE_S)
        for link in links:
            link.close()
        self.slots = ()


class _SendingEnd(_End):
    def __init__(self, slots: Sequence[torch.Tensor], ring: Ring) -> None:
        super().__init__(slots)
        self.ring = ring
        self.links: dict[int, Link] = {}
        self.gone: dict[int, str] = {}
        self.failure: tuple[int, str, str] | None = None
        self.ready = [0] * len(ring.released)
        self.sizes: list[int] = []
        self.launched = 0
        self.moved = 0

    def heard(self) -> bool:
        return self.closed or bool(self.gone) or self.failure is not None

    def alive(self) -> list[Link]:
        """Links that still say something."""
        return [] if self.closed else [link for index, link in self.links.items() if index not in self.gone]

    def hear(self) -> None:
        """Take in what receivers have said, without waiting."""
        with self.changed:
            for index, link in self.links.items():
                try:
                    while not self.closed and index not in self.gone and (frame := link.receive()) is not None:
                        self._take(index, frame)
                except (PeerError, ProtocolError) as error:
                    self.gone[index] = str(error)
            self.launch()
            self.changed.notify_all()

    def launch(self) -> None:
        """Start the broadcasts that everybody is ready for. Call with `changed` held."""
        while not self.heard() and self.launched < min(len(self.sizes), *self.ready) and self.mover is not None:
            slot = self.slots[self.launched % len(self.slots)]
            self.mover.put(self.launched, slot[: self.sizes[self.launched]])
            self.launched += 1

    def arrived(self, number: int) -> None:
        """Broadcast `number` is through."""
        with self.changed:
            self.moved = number + 1
            self.changed.notify_all()

    def check(self, alive: Sequence[int]) -> None:
        """Raises what keeps the sender from going on with the receivers `alive`."""
        if self.closed:
            raise ClosedError("this sender was closed")
        if self.failure is not None:
            raise failed(*self.failure)
        gone = [self.gone[index] for index in sorted(set(alive).intersection(self.gone))]
        if gone:
            raise PeerError("; ".join(gone))
        if self.broken:
            raise TransportError(self.broken)

    def _take(self, index: int, frame: tuple[object, ...]) -> None:
        match frame:
            case ("ready", int(number)) if number == self.ready[index] < len(self.sizes):
                self.ready[index] += 1
            case ("release", int(number)):
                self.ring.release(index, number)
            case ("fail", str(message), str(trace)):
                self.failure = self.failure or (index, message, trace)
            case _:
                raise ProtocolError(f"receiver {index} sent an unknown frame {str(frame[0])[:20]!r}")


class CollectiveSender:
    """Meets `wsync.Sender`. `close` may be called from any thread, the rest from one at a time."""

    by_reference = False

    def __init__(self, listener: Listener, host: str, form: Callable[..., Broadcast], end: _SendingEnd) -> None:
        self._listener, self._host, self._form, self._end = listener, host, form, end
        self._welcome = Welcome(facts=(end.slots[0].numel(), len(end.slots)))

    @property
    def held_bytes(self) -> int:
        """See `wsync.Sender`."""
        return sum(slot.nbytes for slot in self._end.slots)

    def ticket(self) -> Ticket:
        """See `wsync.Sender`."""
        return self._listener.ticket

    def accept(self, deadline: Deadline) -> None:
        """See `wsync.Sender`. `deadline.timeout_s` is the longest time of a broadcast from here on."""
        end, listener = self._end, self._listener
        while True:
            with end.changed:
                end.check(list(end.links))
                for index, link in listener.admit(self._welcome):
                    end.links[index] = link
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
        with end.changed:
            slot, count = end.ring.acquire()
            self._wait(count, list(end.links), deadline)
            end.ring.acquired()
            return end.slots[slot]

    def commit(self, bucket: Bucket) -> None:
        """See `wsync.Sender`. Raises `PeerError` if a receiver is gone."""
        end = self._end
        with end.changed:
            end.check(list(end.links))
            number = end.ring.commit(bucket)
            end.sizes.append(bucket.nbytes)
        deadline = Deadline.after(_FRAME_TIMEOUT_S)
        for index, link in end.links.items():
            try:
                link.send(("commit", number, bucket.index, bucket.nbytes), deadline)
            except PeerError as error:
                end.hear()  # its last words may lie unread
                with end.changed:
                    end.gone.setdefault(index, str(error))
        with end.changed:
            end.check(list(end.links))

    def hand_over(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Not here: raises `UnsupportedError`."""
        raise UnsupportedError("a collective cannot hand tensors over: receivers get copies of its slots")

    def drain(self, deadline: Deadline) -> None:
        """See `wsync.Sender`."""
        with self._end.changed:
            self._wait(self._end.ring.published, (), deadline)

    def close(self) -> None:
        """See `wsync.Sender`."""
        end = self._end
        if not end.closed:
            with end.changed:
                end.closed = True
                end.changed.notify_all()
            self._listener.shutdown()
            end.leave(list(end.links.values()))
            self._listener.close()

    def __del__(self) -> None:
        self.close()

    def _meet(self, timeout_s: float) -> None:
        """Tell the receivers where to meet, and form the group behind the caller's back."""
        end = self._end
        store, port = host_store(self._host, timeout_s)
        for link in end.links.values():
            with suppress(PeerError):  # heard at the next wait
                link.send(("form", port, len(end.links) + 1, timeout_s), Deadline.after(_FRAME_TIMEOUT_S))
        form = partial(self._form, store, self.ticket().address, 0, len(end.links) + 1, self._host, timeout_s)
        with end.changed:
            end.mover = Mover(form, end.arrived, end.fail)

    def _wait(self, count: int, alive: Sequence[int], deadline: Deadline) -> None:
        """Until everybody has released `count` buckets. Call with `changed` held."""
        end = self._end
        while True:
            behind = end.ring.behind(count)
            end.check([*alive, *behind])
            if not behind and end.moved >= count:
                return
            end.changed.wait(deadline.remaining(f"receiver(s) {behind} to release a slot"))


class _ReceivingEnd(_End):
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
                self.link.send(("ready", number), Deadline.after(_FRAME_TIMEOUT_S))
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

    def __init__(self, end: _ReceivingEnd) -> None:
        self._end = end
        end.listen(end.links, end.hear)

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        """See `wsync.Receiver`. The tensors lie in slots of this receiver's own."""
        end = self._end
        with end.changed:
            end.base, end.plan = end.released, plan
        end.agree()
        for bucket in plan.buckets:
            yield bucket, self._receive(bucket, deadline.restart())
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

    def _receive(self, bucket: Bucket, deadline: Deadline) -> tuple[torch.Tensor, ...]:
        end = self._end
        with end.changed:
            while end.moved <= end.released:
                if end.closed:
                    raise ClosedError("this receiver was closed")
                if end.refused is not None:
                    raise end.refused
                if end.gone:
                    raise PeerError(end.gone)
                if end.broken:
                    raise TransportError(end.broken)
                end.changed.wait(deadline.remaining(f"the sender to commit bucket {bucket.index}"))
            if end.closed:
                raise ClosedError("this receiver was closed")
            slot = end.slots[end.released % len(end.slots)]
        return tuple(meta.view(slot) for meta in bucket.tensors)

    def _release(self, deadline: Deadline) -> None:
        end = self._end
        with end.changed:
            if end.closed:
                raise ClosedError("this receiver was closed")
            number = end.released
            end.released += 1
        end.link.send(("release", number), deadline)


class CollectiveTransport:
    """Between processes of any hosts, over a backend of torch.distributed.

    Attributes:
        name: the backend: "gloo", "nccl" or "hccl".
        host: address of this host that the sender binds, and that receivers reach.
    """

    def __init__(self, backend: str, host: str = "127.0.0.1") -> None:
        """Local. The default host is reached from this host only."""
        self.name, self.host = backend, host

    def refuse(self, topology: Topology) -> str | None:
        """See `wsync.Transport`."""
        if self.name not in _FORM:
            return _reason_against(self.name, topology)
        if not dist.is_available() or not dist.is_gloo_available():
            return "this build of torch has no gloo"
        for worker in topology.receivers:
            if worker.device != "cpu":
                return f"a worker is {worker}: its weights are not in host memory"
            near = (worker.host, worker.network) == (topology.sender.host, topology.sender.network)
            if not near and self.host in _LOOPBACK:
                return (
                    f"a worker is {worker}, which cannot reach {self.host} of this host; pass transport="
                    f"wsync.transports.collective.CollectiveTransport({self.name!r}, host=<address that it reaches>)"
                )
        return None

    def sender(self, *, slot_bytes: int, num_slots: int, receivers: int, generation: int) -> CollectiveSender:
        """See `wsync.Transport`."""
        slots = _allocate(slot_bytes, num_slots)
        sock = listen_at(f"[{self.host}]:0")
        ticket = new_ticket(self.name, address_of(sock.getsockname()), generation)
        end = _SendingEnd(slots, Ring(slot_bytes, num_slots, receivers))
        return CollectiveSender(Listener(sock, ticket, receivers), self.host, _FORM[self.name], end)

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> CollectiveReceiver:
        """See `wsync.Transport`. Returns when the sender has admitted it; the group forms meanwhile."""
        link, welcome = connect(ticket, index, deadline)
        try:
            match welcome.facts:
                case (int(slot_bytes), int(num_slots)):
                    end = _ReceivingEnd(link, _allocate(slot_bytes, num_slots))
                case _:
                    raise PeerError("the sender did not say how large its slots are")
            end.form = partial(_join, self.name, ticket.address, index + 1, link.host)
            return CollectiveReceiver(end)
        except BaseException:
            link.close()
            raise


class GlooTransport(CollectiveTransport):
    """Over gloo, for weights in host memory."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """See `CollectiveTransport`."""
        super().__init__("gloo", host)


class NcclTransport(CollectiveTransport):
    """Over NCCL, for weights on CUDA devices."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """See `CollectiveTransport`."""
        super().__init__("nccl", host)


class HcclTransport(CollectiveTransport):
    """Over HCCL, for weights on Ascend devices."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """See `CollectiveTransport`."""
        super().__init__("hccl", host)


def _join(backend: str, address: str, rank: int, host: str, port: int, size: int, timeout_s: float) -> Broadcast:
    store = join_store(address_parts(address)[0], port, timeout_s)
    return _FORM[backend](store, address, rank, size, host, timeout_s)


_FORM: dict[str, Callable[..., Broadcast]] = {"gloo": gloo_broadcast}
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _reason_against(backend: str, topology: Topology) -> str:
    """Why a backend that moves tensors between devices cannot serve."""
    present = dist.is_nccl_available() if backend == "nccl" else dist.is_backend_available(backend)
    if not present:
        return f"this build of torch has no {backend}"
    kind = {"nccl": "cuda", "hccl": "npu"}.get(backend, "")
    for end in (topology.sender, *topology.receivers):
        if end.device.partition(":")[0] != kind:
            return f"{backend} moves tensors between {kind} devices, and this is not one: {end}"
    return f"slots for {backend} would have to be on {kind} devices, where no producer fills them yet"


def _allocate(slot_bytes: int, num_slots: int) -> list[torch.Tensor]:
    try:
        return [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(num_slots)]
    except RuntimeError as error:
        raise TransportError(
            f"cannot allocate {num_slots} slots of {slot_bytes} bytes: {error}; lower bucket_bytes"
        ) from error
