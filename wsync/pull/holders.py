"""From which rank a worker reads what: each element from one of its holders, so that all of them have as much to do."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from wsync.errors import ProtocolError, UnsupportedError
from wsync.gather import without_overlaps
from wsync.plan import Bucket
from wsync.pull.exports import Export, Share
from wsync.regions import Region, uncovered
from wsync.topology import Endpoint


@dataclass(frozen=True, slots=True)
class Holding:
    """Elements of a tensor, and who is to be read for them."""

    export: int
    """Index among the exports."""

    share: Share
    """Of that export, as the rank holds it."""

    over_link: bool
    """See `crosses_link`."""


def crosses_link(owner: Endpoint, reader: Endpoint) -> bool:
    """Whether bytes come to `reader` over a link between devices, which is slower than their memory."""
    return owner.device != reader.device


class Holders:
    """Who has which parts of a bucket."""

    def __init__(self, bucket: Bucket, exports: Sequence[Export]) -> None:
        """Raises `ProtocolError` if nobody has some element, `UnsupportedError` if parts overlap unevenly."""
        held: list[dict[Region, list[tuple[int, Share]]]] = [defaultdict(list) for _ in bucket.tensors]
        for index, one in enumerate(exports):
            for part in one.parts:
                if part.elements.numel:
                    held[part.tensor][part.elements.coalesce()].append((index, part))
        self._exports = exports
        self._parts = []
        for meta, by_region in zip(bucket.tensors, held, strict=True):
            numel = meta.elements.numel
            disjoint = without_overlaps(by_region, numel)
            if by_region and not disjoint:
                raise UnsupportedError(f"{meta.name}: trainer ranks hold parts that overlap without being the same")
            if uncovered(disjoint, numel):
                raise ProtocolError(f"no trainer rank exports some part of {meta.name}")
            self._parts.append(tuple(disjoint.values()))

    def choose(self, reader: Endpoint) -> Sequence[Sequence[Holding]]:
        """For each tensor disjoint parts that cover it. Any process gets the same from the same exports."""
        distances = [_distance(one.endpoint, reader) for one in self._exports]
        load = [0] * len(distances)
        chosen = []
        for parts in self._parts:
            holdings = []
            for alike in parts:
                index, part = min(alike, key=lambda one: (*distances[one[0]], load[one[0]], one[0]))
                load[index] += part.elements.numel * part.place.dtype.itemsize
                holdings.append(Holding(index, part, distances[index][0]))
            chosen.append(holdings)
        return chosen


def _distance(owner: Endpoint, reader: Endpoint) -> tuple[bool, bool]:
    """Less is nearer: no link before one, the same process before another one."""
    return crosses_link(owner, reader), owner.process != reader.process
