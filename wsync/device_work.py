"""What a thread has queued on CUDA devices, as events that others wait for."""

import select
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from wsync.deadline import Deadline

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
