"""From which rank a worker reads what: each element from one of its holders, so that all of them have as much to do."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from wsync.errors import ProtocolError, UnsupportedError, WsyncError
from wsync.gather import aligned, without_overlaps
from wsync.plan import Bucket
from wsync.pull.exports import Export, Probe, Share
from wsync.pull.host_reads import Foreign, HostReads, foreign_memories, read
from wsync.regions import Region, uncovered
from wsync.replay import Step
from wsync.targets import memories_of
from wsync.topology import Endpoint
from wsync.views import Pair, Place

Part = tuple[int, Share]
"""Index of an export, and a share in it."""


class Sources:
    """What is read for one bucket, and where. Worked out once for a list of exports."""

    def __init__(self, bucket: Bucket, steps: Sequence[Step], exports: Sequence[Export], reader: Endpoint) -> None:
        """Args:
        bucket: which.
        steps: what the worker needs of it.
        exports: of all ranks that have any part of it.
        reader: the worker, which reads from itself rather than from others.

        Raises `ProtocolError` if nobody has some element that is needed, `UnsupportedError` if parts overlap unevenly.
        """
        self._bucket, self._steps = bucket, steps
        self._foreign: list[Foreign] = []
        bases = []
        for one in exports:
            bases.append(len(self._foreign))
            self._foreign += foreign_memories(one.endpoint.pid, one.addresses, one.sizes)
        self._chosen = _choose(bucket, exports, reader, bases)
        self._numbers: Mapping[str, int] = {
            name: number for number, name in enumerate(dict.fromkeys(step.target for step in steps))
        }
        self._reads: HostReads | None = None

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> int:
        """Read everything into live `targets`; it is there when this returns. Returns how many bytes were read."""
        tensors = memories_of(targets, self._numbers)
        if self._reads is None:
            pairs = [pair for step in self._steps for pair in self._pairs(step, targets[step.target].dtype)]
            self._reads = HostReads(pairs)
        self._reads.run(self._foreign, tensors)
        return self._reads.nbytes

    def _pairs(self, step: Step, dtype: torch.dtype) -> list[Pair]:
        found, covered = list[Pair](), 0
        number = self._numbers[step.target]
        for elements, place in self._chosen[step.tensor]:
            shared = step.src.intersect(elements)
            covered += sum(region.numel for region in shared)
            pairs = aligned(
                (there for region in shared for o in elements.locate(region) for there in place.region.select(o)),
                (here for region in shared for o in step.src.locate(region) for here in step.dst.select(o)),
            )
            for there, here in pairs:
                source = Place(memory=place.memory, dtype=place.dtype, region=there)
                found.append((source, Place(memory=number, dtype=dtype, region=here)))
        if covered != step.src.numel:
            name = self._bucket.tensors[step.tensor].name
            raise ProtocolError(f"of {name} {step.src.numel} elements are needed; ranks have {covered} of them")
        return found


def _choose(
    bucket: Bucket, exports: Sequence[Export], reader: Endpoint, bases: Sequence[int]
) -> Sequence[Sequence[tuple[Region, Place]]]:
    """For each tensor disjoint regions that cover it, each with one place; memories counted over all exports."""
    holders: list[dict[Region, list[Part]]] = [defaultdict(list) for _ in bucket.tensors]
    for index, one in enumerate(exports):
        for part in one.parts:
            if part.elements.numel:
                holders[part.tensor][part.elements.coalesce()].append((index, part))
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
                parts, key=lambda one: (exports[one[0]].endpoint.process != reader.process, load[one[0]], one[0])
            )
            load[index] += part.elements.numel * part.place.dtype.itemsize
            place = part.place
            there = Place(memory=bases[index] + place.memory, dtype=place.dtype, region=place.region)
            regions.append((part.elements, there))
        chosen.append(regions)
    return chosen


def unreadable(probes: Sequence[Probe], reader: Endpoint) -> str:
    """Why a process cannot read the memory of all ranks; "" if it can."""
    if reader.device != "cpu":
        return f"its weights are on {reader.device}, not in host memory"
    for probe in probes:
        whose = f"trainer rank {probe.rank} ({probe.endpoint})"
        if probe.endpoint.host != reader.host:
            return f"{whose} is on another host"
        try:
            got = read(Foreign(probe.endpoint.pid, probe.address, len(probe.value)))
        except WsyncError as error:
            return f"{whose}: {error}"
        if got != probe.value:
            return f"{whose} has another process id here: they are in different namespaces"
    return ""
