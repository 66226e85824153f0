"""What trainer ranks let others read, as plain data."""

import ctypes
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wsync.errors import TransportError
from wsync.regions import Region
from wsync.topology import Endpoint, local_endpoint
from wsync.traits import addresses
from wsync.transports.device_memory import DeviceExporter, allocate
from wsync.transports.references import Segment
from wsync.views import Place, extents

_PROBE_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Elements of one tensor of a bucket, where one rank has them."""

    tensor: int
    """Index in `Bucket.tensors`."""

    elements: Region
    """Positions in the flattened full tensor."""

    place: Place
    """Of the same sizes: element i of the one is element i of the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What one rank has of a bucket."""

    memories: Sequence[torch.Tensor]
    """What the places of `parts` and `staged` count."""

    parts: tuple[Share, ...]
    staged: tuple[Share, ...] = ()
    """Elements of `parts` once more, in another dtype: for readers behind a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The same for other processes."""

    rank: int
    endpoint: Endpoint
    segments: tuple[Segment, ...]
    """Allocations of the device in which all memories lie. None where they are in host memory."""

    addresses: tuple[int, ...]
    """Of the first byte of each memory, in the rank's process. 0 where no byte of it is needed."""

    sizes: tuple[int, ...]
    """Bytes of each memory, up to the last one that is needed."""

    parts: tuple[Share, ...]
    staged: tuple[Share, ...] = ()


class Exporter:
    """What one rank exports; described anew only when something about it has changed. Holds no tensor."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """`device`: where the rank's weights are."""
        self._rank, self._endpoint, self._where = rank, local_endpoint(device), device
        self._device = None if device.type == "cpu" else DeviceExporter(device)
        self._last: Export | None = None

    def export(self, shares: Shares) -> Export:
        """What other processes need to read `shares`: the same object as the last time if nothing has changed.

        Raises `TransportError` for device memory that cannot be exported, or on another device than the others.
        """
        found, last = addresses(shares.memories), self._last
        known = last is not None and last.parts == shares.parts and last.staged == shares.staged
        if last is None or not known or not self._lies_at(found, last):
            elsewhere = {memory.device for memory in shares.memories if memory.device.type != "cpu"} - {self._where}
            if elsewhere:
                raise TransportError(f"weights are on {sorted(map(str, elsewhere))}, and others on {self._where}")
            sizes = extents([part.place for part in (*shares.parts, *shares.staged)], len(found))
            starts = tuple(start if size else 0 for start, size in zip(found, sizes, strict=True))
            segments = () if self._device is None else dict.fromkeys(self._device.segments(list(filter(None, starts))))
            self._last = last = Export(
                rank=self._rank,
                endpoint=self._endpoint,
                segments=tuple(segments),
                addresses=starts,
                sizes=tuple(sizes),
                parts=shares.parts,
                staged=shares.staged,
            )
        return last

    def _lies_at(self, found: Sequence[int], last: Export) -> bool:
        """Whether memories at `found` are those of `last`: addresses come back with other allocations behind them."""
        same = all(new == old or not size for new, old, size in zip(found, last.addresses, last.sizes, strict=True))
        return same and (self._device is None or self._device.intact(last.segments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A few bytes of a trainer rank: whoever reads them right can read the rest."""

    rank: int
    endpoint: Endpoint
    segments: tuple[Segment, ...]
    """The allocation that they lie in, on a device."""

    address: int
    value: bytes


class Probed:
    """Random bytes in memory of this process, for as long as this object lives."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """Raises `TransportError` if memory of `device` cannot be exported."""
        value, segments = secrets.token_bytes(_PROBE_BYTES), tuple[Segment, ...]()
        if device.type == "cpu":
            self._memory: object = ctypes.create_string_buffer(value, _PROBE_BYTES)
            address = ctypes.addressof(self._memory)
        else:
            handle, memory = allocate(device, _PROBE_BYTES, 1)
            memory[:_PROBE_BYTES].copy_(torch.frombuffer(bytearray(value), dtype=torch.uint8))
            self._memory, address = memory, memory.data_ptr()
            segments = (Segment(handle.hex(), address, memory.numel()),)
        endpoint = local_endpoint(device)
        self.probe = Probe(rank=rank, endpoint=endpoint, segments=segments, address=address, value=value)
