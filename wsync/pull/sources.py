"""From which rank a worker reads what: each element from one of its holders, so that all of them have as much to do."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch

from wsync.errors import ProtocolError, UnsupportedError
from wsync.gather import aligned, without_overlaps
from wsync.plan import Bucket
from wsync.pull import device_reads, host_reads
from wsync.pull.device_reads import DeviceMemories
from wsync.pull.exports import Export, Probe, Share
from wsync.pull.host_reads import Foreign, HostMemories
from wsync.regions import Region, uncovered
from wsync.replay import Step
from wsync.targets import key_of, memories_of
from wsync.topology import CPU, Endpoint
from wsync.views import Pair, Place

Part = tuple[int, Share]
"""Index of an export, and a share in it."""


class Reads(Protocol):
    """Copies from memories of trainer ranks, worked out once and run at every sync."""

    nbytes: int
    """That are read, in the trainer's dtypes."""

    @property
    def seconds(self) -> float:
        """What the last run took, once its targets are there."""
        ...

    def run(self, targets: Sequence[torch.Tensor], key: object | None) -> None:
        """Copy. On a device it is queued on the current stream when this returns, else done.

        `key`: the same object for as long as all `targets` lie where they lay; None if nobody knows.
        """
        ...


class Memories(Protocol):
    """The memories of all exports, one after the other, as this process can read them."""

    def reads(self, pairs: Sequence[Pair]) -> Reads:
        """Copies from places in them to places in targets."""
        ...

    def close(self) -> None:
        """Let go of them, once nothing reads them any more. Never raises."""
        ...


class Sources:
    """What is read for one bucket, and where. Worked out once for a list of exports."""

    def __init__(self, bucket: Bucket, steps: Sequence[Step], exports: Sequence[Export], reader: Endpoint) -> None:
        """Args:
        bucket: which.
        steps: what the worker needs of it.
        exports: of all ranks that have any part of it.
        reader: the worker, which reads from itself rather than from others.

        Raises `ProtocolError` if nobody has some element that is needed, `UnsupportedError` if parts overlap unevenly,
        `TransportError` if memory cannot be mapped.
        """
        chosen = _choose(bucket, exports, reader)
        self._copies = [copy for step in steps for copy in _copies(step, bucket, chosen[step.tensor])]
        self._numbers: Mapping[str, int] = {
            name: number for number, name in enumerate(dict.fromkeys(step.target for step in steps))
        }
        self._reads: Reads | None = None
        self._memories: Memories
        if reader.device == CPU.type:
            self._memories = HostMemories(exports)
        else:
            self._memories = DeviceMemories(exports, reader, {source.memory for source, _, _ in self._copies})

    @property
    def seconds(self) -> float:
        """What the last reading took, once everything is there."""
        return 0.0 if self._reads is None else self._reads.seconds

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> int:
        """Read everything into live `targets`. Returns how many bytes these are, in the trainer's dtypes.

        On a device it is queued on the current stream then, else done.
        """
        tensors = memories_of(targets, self._numbers)
        if self._reads is None:
            pairs = [
                (source, Place(memory=self._numbers[name], dtype=targets[name].dtype, region=region))
                for source, name, region in self._copies
            ]
            self._reads = self._memories.reads(pairs)
        self._reads.run(tensors, key_of(targets))
        return self._reads.nbytes

    def close(self) -> None:
        """Let go of the ranks' memory, once nothing reads it any more."""
        self._memories.close()


def _copies(step: Step, bucket: Bucket, chosen: Sequence[tuple[Region, Place]]) -> Iterator[tuple[Place, str, Region]]:
    """What `step` needs out of the places of its tensor: from where, to which target, and where in it."""
    covered = 0
    for elements, place in chosen:
        shared = step.src.intersect(elements)
        covered += sum(region.numel for region in shared)
        pairs = aligned(
            (there for region in shared for o in elements.locate(region) for there in place.region.select(o)),
            (here for region in shared for o in step.src.locate(region) for here in step.dst.select(o)),
        )
        for there, here in pairs:
            yield Place(memory=place.memory, dtype=place.dtype, region=there), step.target, here
    if covered != step.src.numel:
        name = bucket.tensors[step.tensor].name
        raise ProtocolError(f"of {name} {step.src.numel} elements are needed; ranks have {covered} of them")


def _choose(bucket: Bucket, exports: Sequence[Export], reader: Endpoint) -> Sequence[Sequence[tuple[Region, Place]]]:
    """For each tensor disjoint regions that cover it, each with one place; memories counted over all exports."""
    holders: list[dict[Region, list[Part]]] = [defaultdict(list) for _ in bucket.tensors]
    for index, one in enumerate(exports):
        for part in one.parts:
            if part.elements.numel:
                holders[part.tensor][part.elements.coalesce()].append((index, part))
    bases = list(accumulate((len(one.addresses) for one in exports), initial=0))
    load = [0] * len(exports)
    chosen = []
    for meta, by_region in zip(bucket.tensors, holders, strict=True):
        numel = meta.elements.numel
        disjoint = without_overlaps(by_region, numel)
        if by_region and not disjoint:
            raise UnsupportedError(f"{meta.name}: trainer ranks hold parts that overlap without being the same")
        if uncovered(disjoint, numel):
            raise ProtocolError(f"no trainer rank exports some part of {meta.name}")
        regions = []
        for parts in disjoint.values():
            index, part = min(
                parts, key=lambda one: (*_distance(exports[one[0]].endpoint, reader), load[one[0]], one[0])
            )
            load[index] += part.elements.numel * part.place.dtype.itemsize
            place = part.place
            there = Place(memory=bases[index] + place.memory, dtype=place.dtype, region=place.region)
            regions.append((part.elements, there))
        chosen.append(regions)
    return chosen


def _distance(owner: Endpoint, reader: Endpoint) -> tuple[bool, bool]:
    """Less is nearer: the same device before another one, the same process before another one."""
    return owner.device != reader.device, owner.process != reader.process


def unreadable(probes: Sequence[Probe], reader: Endpoint) -> str:
    """Why a process cannot read the memory of all ranks; "" if it can."""
    on_host = reader.device == CPU.type
    for probe in probes:
        owner, whose = probe.endpoint, f"trainer rank {probe.rank} ({probe.endpoint})"
        if owner.host != reader.host:
            return f"{whose} is on another host"
        if (owner.device == CPU.type) is not on_host:
            return f"{whose} does not have its weights where the worker has them, on {reader.device}"
        if not on_host and owner.process == reader.process and owner.device != reader.device:
            return f"{whose} is this very process, and the worker's weights are on {reader.device}"
        try:
            got = host_reads.read(_foreign(probe)) if on_host else device_reads.read(probe, reader)
        except Exception as error:  # whatever a driver or a compiler raises: then buckets serve
            return f"{whose}: {error}"
        if got != probe.value:
            return f"{whose} has another process id here: they are in different namespaces"
    return ""


def _foreign(probe: Probe) -> Foreign:
    """Where its bytes lie."""
    return Foreign(probe.endpoint.pid, probe.address, len(probe.value))
