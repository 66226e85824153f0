"""Strided copies out of device memory of other processes of this host, mapped over CUDA IPC, with the cast inside."""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch

from wsync.copies import Copies
from wsync.device import device_of
from wsync.device_work import DeviceTimer, Readers
from wsync.errors import TransportError
from wsync.pull.exports import Export, Probe
from wsync.regions import Region
from wsync.topology import Endpoint
from wsync.transports.device_memory import handle_bytes, open_exported, own_memory
from wsync.transports.references import Segment
from wsync.views import Pair, Place


class DeviceMemories:
    """Memories of trainer ranks, mapped on the device that reads them. See `wsync.pull.sources.Memories`."""

    def __init__(self, exports: Sequence[Export], reader: Endpoint, needed: Collection[int]) -> None:
        """Map what holds the memories of these numbers, counted over all exports.

        Raises `TransportError` if the driver refuses to map one.
        """
        self._device = device_of(reader.device)
        self._readers = Readers(self._device)
        firsts = accumulate((len(one.addresses) for one in exports), initial=0)
        self._tensors = [
            memory
            for one, first in zip(exports, firsts, strict=False)
            for memory in _mapped(one, reader, self._device, {number - first for number in needed})
        ]

    def reads(self, pairs: Sequence[Pair]) -> "DeviceReads":
        """See `Memories`."""
        return DeviceReads(pairs, self._tensors, self._device, self._readers)

    def close(self) -> None:
        """See `Memories`. What is queued is waited for, as `Readers.release` does."""
        self._readers.release(list(self._tensors))
        self._tensors.clear()


class DeviceReads:
    """Copies that are worked out once and run at every sync. See `wsync.pull.sources.Reads`.

    What lies on other devices comes on a stream of its own, beside what lies on this one.
    """

    def __init__(
        self, pairs: Sequence[Pair], sources: list[torch.Tensor], device: torch.device, readers: Readers
    ) -> None:
        """`pairs`: from places in `sources` to places in targets on `device`; `readers` hears on which streams."""
        self.nbytes = sum(source.region.numel * source.dtype.itemsize for source, _ in pairs)
        self._sources, self._device, self._readers = sources, device, readers
        far = [pair for pair in pairs if sources[pair[0].memory].device != device]
        near = [pair for pair in pairs if sources[pair[0].memory].device == device]
        self._near = Copies(near, device=device)
        self._far = Copies(far, device=device, over_link=True) if far else None
        self._side: Any = torch.cuda.Stream(device) if far else None  # type: ignore[no-untyped-call]
        self._timer = DeviceTimer(device)

    def run(self, targets: Sequence[torch.Tensor], key: object | None = None) -> None:
        """Read, before all that is queued on the current stream afterwards."""
        stream, keys = torch.cuda.current_stream(self._device), (self, key)  # sources never move
        self._readers.add_current()
        self._timer.begin()
        try:
            if self._far is not None:  # first: the device begins no program of a later launch while one of this waits
                self._side.wait_stream(stream)
                with torch.cuda.stream(self._side):
                    self._far.run(self._sources, targets, keys)
            self._near.run(self._sources, targets, keys)
        finally:
            if self._far is not None:
                stream.wait_stream(self._side)
        self._timer.end()

    @property
    def seconds(self) -> float:
        """See `Reads`."""
        return self._timer.seconds


def read(probe: Probe, reader: Endpoint) -> bytes:
    """The bytes of `probe`, as the copies of a sync would bring them. Raises as `DeviceMemories`."""
    device, nbytes = device_of(reader.device), len(probe.value)
    [segment] = probe.segments
    memory = _open(segment, probe.endpoint, reader, device)
    found = torch.empty(nbytes, dtype=torch.uint8, device=device)
    whole = Place(memory=0, dtype=torch.uint8, region=Region.span(0, nbytes))
    DeviceReads([(whole, whole)], [memory], device, Readers(device)).run([found])
    return found.cpu().numpy().tobytes()


def _mapped(export: Export, reader: Endpoint, device: torch.device, needed: Collection[int]) -> Iterator[torch.Tensor]:
    """Each memory of one rank, uint8; an empty tensor for those that are not needed."""
    segments = sorted(export.segments, key=lambda segment: segment.start)
    starts = [segment.start for segment in segments]
    opened: dict[int, torch.Tensor] = {}
    for number, (address, nbytes) in enumerate(zip(export.addresses, export.sizes, strict=True)):
        if number not in needed or not nbytes:
            yield torch.empty(0, dtype=torch.uint8)
            continue
        holding = bisect_right(starts, address) - 1
        if holding < 0 or address + nbytes > starts[holding] + segments[holding].nbytes:
            raise TransportError(
                f"a trainer rank exports {nbytes} bytes at {address:#x}, which is in none of its allocations"
            )
        if holding not in opened:
            opened[holding] = _open(segments[holding], export.endpoint, reader, device)
        start = address - starts[holding]
        yield opened[holding][start : start + nbytes]


def _open(segment: Segment, owner: Endpoint, reader: Endpoint, device: torch.device) -> torch.Tensor:
    """All of `segment`, uint8: mapped, or as it is if it is of this process."""
    holder = device_of(owner.device)
    if owner.process == reader.process:
        return own_memory(holder, segment.start, segment.nbytes)
    return open_exported(device, handle_bytes(segment.key), segment.nbytes, holder=holder)
