"""Producers and consumers that a test starts beside itself: a thread, or a real process that can be killed.

The test and its actor talk over a pipe; every wait on it has a deadline.
"""

import multiprocessing as mp
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from wsync.deadline import Deadline
from wsync.plan import Plan
from wsync.protocols import Receiver, Ticket, Transport
from wsync.testing.processes import forkserver
from wsync.testing.samples import bytes_of, digests_of, fill_slot, plan_of, tensor_zoo
from wsync.topology import CPU

MakeTransport = Callable[[], Transport]


class Actor:
    """`body(pipe, *args)` on a thread, or in a process of its own that ends with the context, by SIGKILL if need be."""

    def __init__(self, process: bool, timeout_s: float, body: Callable[..., None], *args: object) -> None:
        self._timeout_s = timeout_s
        self._pipe, theirs = mp.Pipe()
        self._process: mp.process.BaseProcess | None = None
        self._thread: threading.Thread | None = None
        if process:
            self._process = forkserver().Process(target=_in_process, args=(theirs, body, args), daemon=True)
            self._process.start()
            theirs.close()
        else:
            self._thread = threading.Thread(target=_in_thread, args=(theirs, body, args), daemon=True)
            self._thread.start()

    @property
    def pid(self) -> int:
        """Process id of an actor that has a process of its own."""
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    def hear(self, kind: str) -> Any:
        """The actor's next message, which must be of `kind`. Raises `AssertionError` if it is another, late or none."""
        said, value = self.hear_any()
        if said != kind:
            raise AssertionError(f"the other side said {said!r} ({value}); expected {kind!r}")
        return value

    def hear_any(self) -> tuple[str, Any]:
        """The actor's next message as (kind, value). Raises `AssertionError` if it is late or none."""
        if not self._pipe.poll(self._timeout_s):
            raise AssertionError(f"the other side said nothing for {self._timeout_s:g} s")
        try:
            message: tuple[str, Any] = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise AssertionError("the other side ended without a word") from None
        return message

    def tell(self, message: object) -> None:
        """Send `message` to the actor's pipe."""
        self._pipe.send(message)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the actor's process and, for SIGKILL, wait until it is gone."""
        os.kill(self.pid, number)
        if self._process is not None and number == signal.SIGKILL:
            self._process.join(self._timeout_s)

    def __enter__(self) -> "Actor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        if self._process is not None:
            if kind is not None:
                self._process.kill()
            self._process.join(self._timeout_s)
            self._process.kill()
            self._process.join()
            self._process.close()
        if self._thread is not None:
            self._thread.join(self._timeout_s)


def _in_process(pipe: Connection, body: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    _in_thread(pipe, body, args)


def _in_thread(pipe: Connection, body: Callable[..., None], args: tuple[object, ...]) -> None:
    # The test may leave its end of the pipe without hearing the actor out.
    with pipe, suppress(EOFError, BrokenPipeError, ConnectionResetError):
        body(pipe, *args)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a consumer does."""

    ticket: Ticket
    plan: Plan
    index: int = 0
    syncs: int = 1
    timeout_s: float = 30.0
    wait_at: int | None = None
    """Bucket at which it says "waiting" and goes on when told."""

    raise_at: int | None = None
    """Bucket at which it raises, with that bucket's tensors in hand."""

    kill_at: int | None = None
    """Bucket at which it kills its own process."""

    keep_views: bool = False
    """Keep the tensors after releasing them, and report what they hold at the end."""


def consume(pipe: Connection, make_transport: MakeTransport, order: Order) -> None:
    """Body of a consumer: says "connected", then per sync "synced" with the digests of what arrived.

    At the end: "kept" with the kept views' bytes, if asked to keep them; "done" with how many descriptors were open
    after the first sync and after the last. Or "error" with (type, text, remote traceback).
    """
    receiver: Receiver | None = None
    try:
        receiver = make_transport().receiver(order.ticket, order.index, Deadline.after(order.timeout_s))
        pipe.send(("connected", os.getpid()))
        kept: list[torch.Tensor] = []
        # Allocated once, so that the memory of this process says something about the transport.
        arrived = {spec.name: torch.empty(spec.nbytes, dtype=torch.uint8) for spec in order.plan.specs}
        descriptors = []
        for _ in range(order.syncs):
            _read(pipe, receiver, order, arrived, kept)
            digests = digests_of(arrived)
            descriptors.append(open_descriptors())
            pipe.send(("synced", digests))
        if order.keep_views:
            pipe.recv()
            pipe.send(("kept", [bytes_of(t).cpu().numpy().tobytes() for t in kept]))
        pipe.send(("done", (descriptors[0], descriptors[-1])))
    except BaseException as error:
        if receiver is not None:
            receiver.fail(str(error))
        pipe.send(("error", (type(error).__name__, str(error), getattr(error, "remote_traceback", ""))))
    finally:
        if receiver is not None:
            receiver.close()


def _read(
    pipe: Connection, receiver: Receiver, order: Order, arrived: dict[str, torch.Tensor], kept: list[torch.Tensor]
) -> None:
    """One sync: the bytes of every tensor, put together in `arrived` from its chunks."""
    for bucket, tensors in receiver.buckets(order.plan, Deadline.after(order.timeout_s)):
        if order.wait_at == bucket.index:
            pipe.send(("waiting", bucket.index))
            pipe.recv()
        if order.kill_at == bucket.index:
            os.kill(os.getpid(), signal.SIGKILL)
        if order.raise_at == bucket.index:
            raise RuntimeError(f"the consumer gives up at bucket {bucket.index}")
        for meta, tensor in zip(bucket.tensors, tensors, strict=True):
            arrived[meta.name][meta.chunk_offset : meta.chunk_offset + meta.chunk_nbytes] = bytes_of(tensor)
        kept += tensors if order.keep_views else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What a producer that runs beside the test does: it leaves at a bucket, in the way that is named."""

    seed: int
    bucket_bytes: int
    leave_at: int
    leave: str
    """"kill": SIGKILL to its own process; "close": its sender; "wait": commit nothing more until told."""

    timeout_s: float
    device: torch.device = CPU


def produce(pipe: Connection, make_transport: MakeTransport, delivery: Delivery) -> None:
    """Body of a producer. Says "ticket" with (ticket, plan), accepts one receiver, commits, leaves as told."""
    tensors = tensor_zoo(delivery.seed, 4 * delivery.bucket_bytes)
    plan = plan_of(tensors, delivery.bucket_bytes)
    deadline = Deadline.after(delivery.timeout_s)
    sender = make_transport().sender(
        slot_bytes=plan.capacity, num_slots=2, receivers=1, generation=1, device=delivery.device
    )
    try:
        pipe.send(("ticket", (sender.ticket(), plan)))
        sender.accept(deadline)
        for bucket in plan.buckets[: delivery.leave_at]:
            fill_slot(bucket, sender.acquire(deadline), tensors)
            sender.commit(bucket)
        if delivery.leave == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if delivery.leave == "wait":
            pipe.send(("waiting", delivery.leave_at))
            pipe.recv()
    finally:
        sender.close()


def open_descriptors() -> int:
    """How many descriptors this process has open (Linux)."""
    return len(list(Path("/proc/self/fd").iterdir())) - 1


def descriptors() -> Counter[str]:
    """What the open descriptors of this process are of (Linux)."""
    found = Counter[str]()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one of this list
            found[os.readlink(link)] += 1
    return found


def resident_bytes() -> int:
    """Memory of this process that is in use now, shared pages included (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
