"""Copies between device memory and host memory, beside what the device is doing, waited for with a deadline."""

import time
from collections.abc import Iterable

import torch

from wsync.deadline import Deadline

_POLL_S = 2e-4


class HostCopies:
    """Copies that run on one stream of their own a device, kept over calls. On the CPU they just run."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], deadline: Deadline, what: str) -> None:
        """Copy each (destination, source), contiguous tensors of one size; CUDA's partners are pinned host memory.

        Work that was queued on the current stream before is finished first, work that is queued there afterwards
        sees the copies, and so does the host: one wait for all of them. After an error some may still run; memory of
        the device that they use is not given to others before they end.

        Args:
            pairs: taken one by one, so that making one goes on beside the copies before it.
            what: for the message of a `SyncTimeout`.
        """
        busy: dict[torch.device, torch.cuda.Stream] = {}
        queued: list[tuple[torch.cuda.Stream, torch.Tensor]] = []
        try:
            for destination, source in pairs:
                on_device = destination if destination.device.type != "cpu" else source
                if on_device.device.type == "cuda":
                    stream = busy.get(on_device.device) or self._begin(on_device.device)
                    busy[on_device.device] = stream
                    queued.append((stream, on_device))
                    with torch.cuda.stream(stream):
                        destination.copy_(source, non_blocking=True)
                else:
                    deadline.remaining(what)
                    destination.copy_(source)
            done = [(device, stream.record_event()) for device, stream in busy.items()]
            for device, event in done:
                _wait(event, deadline, what)
                torch.cuda.current_stream(device).wait_event(event)
        except BaseException:
            for stream, tensor in queued:
                tensor.record_stream(stream)
            raise

    def _begin(self, device: torch.device) -> torch.cuda.Stream:
        """The stream of `device`, behind what is queued there: bytes that are still computed, memory in other use."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream


def _wait(event: torch.cuda.Event, deadline: Deadline, what: str) -> None:
    while not event.query():  # type: ignore[no-untyped-call]
        deadline.remaining(what)
        time.sleep(_POLL_S)
