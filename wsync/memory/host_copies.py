"""Copies between device memory and host memory, beside what the device is doing, waited for with a deadline."""

import time
from collections.abc import Sequence

import torch

from wsync.deadline import Deadline

_POLL_S = 2e-4


class HostCopies:
    """Copies that run on one stream of their own a device, kept over calls. On the CPU they just run."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], deadline: Deadline, what: str) -> None:
        """Copy each (destination, source), contiguous tensors of one size; CUDA's partners are pinned host memory.

        Work that was queued on the current stream before is finished first, work that is queued there afterwards
        sees the copies, and so does the host: one wait for all of them. After an error some may still run; memory of
        the device that they use is not given to others before they end.

        Args:
            what: for the message of a `SyncTimeout`.
        """
        by_device: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for pair in pairs:
            on_device = next((tensor for tensor in pair if tensor.device.type != "cpu"), pair[0])
            by_device.setdefault(on_device.device, []).append(pair)
        queued: list[tuple[torch.cuda.Stream, torch.Tensor]] = []
        try:
            done = []
            for device, here in by_device.items():
                if device.type == "cuda":
                    done.append(self._queue(device, here, queued))
                else:
                    for destination, source in here:
                        deadline.remaining(what)
                        destination.copy_(source)
            for device, event in done:
                _wait(event, deadline, what)
                torch.cuda.current_stream(device).wait_event(event)
        except BaseException:
            for stream, tensor in queued:
                tensor.record_stream(stream)
            raise

    def _queue(
        self,
        device: torch.device,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        queued: list[tuple[torch.cuda.Stream, torch.Tensor]],
    ) -> tuple[torch.device, torch.cuda.Event]:
        """Start copies of one device; enter what they use there in `queued`. The event that comes after them."""
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Before a copy out the bytes may still be computed; before a copy in the memory may still be in other use.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for destination, source in pairs:
                queued.append((stream, destination if destination.is_cuda else source))
                destination.copy_(source, non_blocking=True)
        return device, stream.record_event()


def _wait(event: torch.cuda.Event, deadline: Deadline, what: str) -> None:
    while not event.query():  # type: ignore[no-untyped-call]
        deadline.remaining(what)
        time.sleep(_POLL_S)
