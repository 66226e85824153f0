"""What a backend brings to a collective transport, and the thread that moves buckets through its groups."""

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from wsync.errors import TransportError
from wsync.topology import Topology
from wsync.transports.board import Board
from wsync.transports.slots import SlotMemory

LEAVE_S = 2.0
"""How long, in seconds, a thread that may be stuck in the backend is waited for; how long the backend's error waits for
the reason, which comes over the link; and how long a broadcast may go on after a peer of it has left."""

_LOOK_S = 1e-4

Fact = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The place of one rank in a group that is to be formed."""

    rank: int
    """0 sends."""

    size: int
    """How many ranks there are."""

    here: str
    """Address of this host at which the others reach it."""

    timeout_s: float
    """Longest time, in seconds, for what the backend itself gives up in time."""

    board: Board
    """Where the ranks tell each other what they need to form it."""


class Group(Protocol):
    """One rank of a group that was formed. Used, and closed, by the thread that formed it."""

    def start(self, slot: int, tensor: torch.Tensor) -> Callable[[], bool]:
        """Broadcast `tensor`, which lies in `slot`, from rank 0 to all others.

        When it returns, users of the slot may queue work on it: `SlotMemory` puts that after the broadcast. What it
        gives says whether this rank's part is done, without waiting, and raises if it never will be.
        """
        ...

    def close(self) -> None:
        """Leave, whatever runs: that is ended."""
        ...


Form = Callable[[Callable[[], None]], Group]
"""`Backend.form` with a seat and slots."""


class Backend(Protocol):
    """A library that broadcasts."""

    def refuse(self, topology: Topology) -> str | None:
        """As `wsync.Transport`, apart from who reaches whom."""
        ...

    def facts(self, device: torch.device) -> Sequence[Fact]:
        """What the sender, with its weights on `device`, tells of its side."""
        ...

    def compare(self, facts: Sequence[Fact]) -> None:
        """At a receiver: raises `ConfigError` if a group with a sender that tells `facts` would not work."""
        ...

    def memory(self, slot_bytes: int, num_slots: int, device: torch.device | None) -> SlotMemory:
        """Slots of this rank; None: on the device that is current. Raises `TransportError` if there is no memory."""
        ...

    def form(self, seat: Seat, memory: SlotMemory, check: Callable[[], None]) -> Group:
        """Wait until all ranks are here, on the thread that will use the group.

        While it waits it calls `check`, which raises if nobody wants the group.
        """
        ...


def allocate(slot_bytes: int, num_slots: int, device: torch.device) -> Sequence[torch.Tensor]:
    """Slots out of torch's allocator. Raises `TransportError` if there is no memory."""
    try:
        return [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(num_slots)]
    except RuntimeError as error:
        raise TransportError(
            f"cannot allocate {num_slots} slots of {slot_bytes} bytes on {device}: {error}; lower bucket_bytes or "
            f"num_slots"
        ) from error


class Mover:
    """Starts broadcasts in order on a thread of its own, which forms the group first, and sees which of them are done.

    No broadcast waits for the one before to be done, so that a device is never without one.
    """

    def __init__(
        self,
        form: Form,
        begun: Callable[[int], None],
        moved: Callable[[int], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Start. `begun` and `moved` are told numbers of broadcasts, `failed` why there will be no more of them."""
        self._until = math.inf
        self._queue: queue.SimpleQueue[tuple[int, int, torch.Tensor] | None] = queue.SimpleQueue()
        # The thread has them, and not this object: they lead to whoever holds it.
        self._thread = threading.Thread(
            target=self._run, args=(form, begun, moved, failed), name="wsync broadcasts", daemon=True
        )
        self._thread.start()

    def put(self, number: int, slot: int, tensor: torch.Tensor) -> None:
        """Broadcast `tensor` (contiguous uint8 in `slot`, which nobody uses until `begun(number)`)."""
        self._queue.put((number, slot, tensor))

    def hurry(self) -> None:
        """A peer is gone: what does not end by itself within `LEAVE_S` is given up."""
        self._until = min(self._until, time.monotonic() + LEAVE_S)

    def stop(self, timeout_s: float) -> None:
        """End, and give up what runs. Waits no longer than `timeout_s` seconds for a backend that cannot be ended."""
        self._until = -math.inf
        self._queue.put(None)
        if self._thread is not threading.current_thread():  # which the garbage collector may run on
            self._thread.join(timeout_s)

    def _run(
        self,
        form: Form,
        begun: Callable[[int], None],
        moved: Callable[[int], None],
        failed: Callable[[Exception], None],
    ) -> None:
        try:
            group = form(self._check)
            del form
            try:
                self._serve(group, begun, moved)
            finally:
                group.close()
        except Exception as error:
            failed(error)

    def _serve(self, group: Group, begun: Callable[[int], None], moved: Callable[[int], None]) -> None:
        running = deque[tuple[int, Callable[[], bool]]]()
        while True:
            while running and running[0][1]():
                moved(running.popleft()[0])
            if running:
                self._check()
            try:
                item = self._queue.get(timeout=_LOOK_S if running else None)
            except queue.Empty:
                continue
            if item is None:
                return
            number, slot, tensor = item
            done = group.start(slot, tensor) if tensor.numel() else _at_once
            del item, tensor
            begun(number)
            running.append((number, done))

    def _check(self) -> None:
        if time.monotonic() > self._until:
            raise TransportError("it was given up, as a process of its group is gone")


def _at_once() -> bool:
    return True
