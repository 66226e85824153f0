"""What a thread has queued on CUDA devices, as events that others wait for."""

import logging
import select
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from wsync.deadline import Deadline
from wsync.errors import SyncTimeout

_log = logging.getLogger(__name__)

_PATIENCE_S = 10.0
"""For a device to do what was queued on it, where nobody gives a deadline."""

Events = Sequence[tuple[torch.device, Any]]
"""One `torch.cuda.Event` a CUDA device: all that one thread had queued on its current stream there."""


def queued(devices: Collection[torch.device]) -> Events:
    """An event on the current stream of each of these CUDA devices."""
    make: Any = torch.cuda.Event
    events = []
    for device in devices:
        event = make()
        event.record(torch.cuda.current_stream(device))
        events.append((device, event))
    return events


def order_after(events: Events) -> None:
    """Let the current streams wait; the calling thread does not."""
    for device, event in events:
        torch.cuda.current_stream(device).wait_event(event)


def wait_for(
    events: Events, deadline: Deadline, look: Callable[[], None] = lambda: None, waiting_for: str = ""
) -> None:
    """Wait until all of it is done, and call `look` meanwhile, which may end that by raising.

    Raises `SyncTimeout`, which names `waiting_for` or else the device, and `RuntimeError` if a device failed.
    """
    for device, event in events:
        while not event.query():
            look()
            deadline.remaining(waiting_for or f"{device} to do what was queued")
            select.select((), (), (), 0)  # other threads may run; time.sleep(0) would take 50 us


class Readers:
    """The streams on which something reads memory of other processes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: set[Any] = set()

    def add_current(self) -> None:
        """The current stream is one from here on."""
        self._streams.add(torch.cuda.current_stream(self._device))

    def release(self, memory: object) -> bool:
        """Whether all is done that was queued on them, so that `memory` can be unmapped. Waits a while for it.

        If not, `memory` is kept for as long as this process lives: a stream may wait for a process that is dead or
        stopped, and to unmap what it is about to read would end all work of the device. Never raises.
        """
        try:
            events = [(self._device, stream.record_event()) for stream in self._streams]
            wait_for(events, Deadline.after(_PATIENCE_S))
        except (SyncTimeout, RuntimeError) as error:
            _log.warning(
                "memory of another process stays mapped, since %s may still read it: %s", self._device, str(error)
            )
            _kept.append(memory)
            return False
        return True


_kept: list[object] = []


class DeviceTimer:
    """How long a device takes from `begin` to `end` on its current stream. In host memory it is the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def begin(self) -> None:
        """From here on, behind all that is queued."""
        self._marks = [self._mark()]

    def end(self) -> None:
        """Up to here."""
        self._marks.append(self._mark())

    @property
    def seconds(self) -> float:
        """Of the last `begin` and `end`, once the device has come so far; 0 before the first."""
        if len(self._marks) < 2:
            return 0.0
        begin, end = self._marks
        return float(end - begin if self._device.type == "cpu" else begin.elapsed_time(end) / 1e3)

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
