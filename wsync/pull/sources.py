"""What a worker reads of trainer ranks: which bytes, out of which memories, and to where."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

import torch

from wsync.errors import ProtocolError
from wsync.gather import aligned
from wsync.plan import Bucket
from wsync.pull import device_reads, host_reads
from wsync.pull.device_reads import DeviceMemories
from wsync.pull.exports import Export, Probe, Share
from wsync.pull.holders import Holders
from wsync.pull.host_reads import Foreign, HostMemories
from wsync.regions import Region
from wsync.replay import Step
from wsync.targets import key_of, memories_of
from wsync.topology import CPU, Endpoint
from wsync.views import Pair, Place


class Reads(Protocol):
    """Copies from memories of trainer ranks, worked out once and run at every sync."""

    nbytes: int
    """That are read, each in the dtype that it is read in."""

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

    def __init__(
        self,
        bucket: Bucket,
        steps: Sequence[Step],
        dtypes: Mapping[str, torch.dtype],
        exports: Sequence[Export],
        reader: Endpoint,
    ) -> None:
        """Args:
        bucket: which.
        steps: what the worker needs of it.
        dtypes: of the targets.
        exports: of all ranks that have any part of it.
        reader: the worker, which reads from itself rather than from others.

        Raises `ProtocolError` if nobody has some element that is needed, `UnsupportedError` if parts overlap unevenly,
        `TransportError` if memory cannot be mapped.
        """
        readable = _readable(bucket, exports, reader)
        self._copies = [
            copy for step in steps for copy in _copies(step, bucket, readable[step.tensor], dtypes[step.target])
        ]
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
        """Read everything into live `targets`. Returns how many bytes these are, as they were read.

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


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements of a tensor that are read of one rank."""

    held: Share
    staged: Sequence[Share]
    """Some of them in other dtypes, if the way to them is a link."""

    base: int
    """Number of the rank's first memory, counted over all exports."""

    def share(self, region: Region, dtype: torch.dtype) -> Share:
        """Where to read `region` for a target of `dtype`. Only what is staged in just that is rounded once."""
        cast = [share for share in self.staged if share.place.dtype == dtype]
        alike = (share for share in cast if share.elements == region.coalesce())
        around = (share for share in cast if _numel(share.elements.intersect(region)) == region.numel)
        return next(chain(alike, around), self.held)


def _readable(bucket: Bucket, exports: Sequence[Export], reader: Endpoint) -> Sequence[Sequence[_Part]]:
    """For each tensor disjoint parts that cover it."""
    bases = list(accumulate((len(one.addresses) for one in exports), initial=0))
    staged: Mapping[tuple[int, int], list[Share]] = defaultdict(list)
    for index, one in enumerate(exports):
        for share in one.staged:
            staged[index, share.tensor].append(share)
    return [
        [_Part(one.share, staged[one.export, tensor] if one.over_link else (), bases[one.export]) for one in holdings]
        for tensor, holdings in enumerate(Holders(bucket, exports).choose(reader))
    ]


def _copies(
    step: Step, bucket: Bucket, parts: Sequence[_Part], dtype: torch.dtype
) -> Iterator[tuple[Place, str, Region]]:
    """What `step` needs out of the places of its tensor: from where, to which target, and where in it."""
    covered = 0
    for part in parts:
        for region in step.src.intersect(part.held.elements):
            covered += region.numel
            share = part.share(region, dtype)
            pairs = aligned(
                (there for o in share.elements.locate(region) for there in share.place.region.select(o)),
                (here for o in step.src.locate(region) for here in step.dst.select(o)),
            )
            for there, here in pairs:
                source = Place(memory=part.base + share.place.memory, dtype=share.place.dtype, region=there)
                yield source, step.target, here
    if covered != step.src.numel:
        name = bucket.tensors[step.tensor].name
        raise ProtocolError(f"of {name} {step.src.numel} elements are needed; ranks have {covered} of them")


def _numel(regions: Sequence[Region]) -> int:
    return sum(region.numel for region in regions)


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
