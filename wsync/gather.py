"""Who sends which part of each bucket to whom: pure layout, the same on every rank, worked out once per plan.

A sender takes what it holds itself; for the rest one holder of each part is chosen, the one with the least to send.
What a rank sends to one sender for one bucket goes in *packets*, already in wire dtype: large parts that lie contiguous
in the bucket each in one of its own, which is received in place, all others one after the other in a single one, whose
parts the sender then puts in their places.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from wsync.errors import UnsupportedError
from wsync.plan import Bucket, Plan, TensorMeta, TensorSpec
from wsync.regions import Region

T = TypeVar("T")

PACKET_ALIGNMENT_BYTES = 16
"""Parts of a packet start at multiples of this: no dtype is wider."""

IN_PLACE_BYTES = 256 << 10
"""From this size on a message of its own costs less than the copy that it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements of one tensor that one rank puts into a bucket."""

    tensor: TensorMeta
    """The tensor or chunk in the bucket that they belong to."""

    owner: Region
    """The region of the full tensor that its holder declared."""

    source: Region
    """Ordinals in `owner`."""

    slot: Region
    """The same elements, of the same sizes, as positions in the chunk, which begins at byte `tensor.offset`."""

    @property
    def nbytes(self) -> int:
        """Bytes in wire dtype."""
        return self.source.numel * self.tensor.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """One message: parts with their byte offsets in it."""

    parts: tuple[Part, ...]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, parts: Sequence[Part]) -> "Packet":
        """`parts` one after the other, each aligned."""
        offsets, end = [], 0
        for part in parts:
            offsets.append(align(end))
            end = offsets[-1] + part.nbytes
        return cls(parts=tuple(parts), offsets=tuple(offsets), nbytes=end)

    @property
    def in_place(self) -> bool:
        """Whether it can be received where it belongs in the slot."""
        return len(self.parts) == 1 and self.parts[0].slot.run_length == self.parts[0].slot.numel


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketGather:
    """What one rank does for one bucket."""

    own: tuple[Part, ...] = ()
    """Parts that this rank holds and puts into its own slot. Empty on ranks that are no sender."""

    packets: tuple[Packet, ...] = ()
    """What this rank packs. A packet that several senders want is packed once."""

    sends: tuple[tuple[int, int], ...] = ()
    """(sender rank, index in `packets`), by sender; to each of them in the order in which it receives."""

    receives: tuple[tuple[int, Packet], ...] = ()
    """(source rank, packet), by source."""

    exchanged: bool = False
    """Whether any rank sends a packet to another for this bucket. The same on every rank."""


class GatherPlan:
    """`BucketGather` of every bucket of a plan, for one rank.

    Args:
        plan: with the owners of all ranks.
        senders: ranks that have a slot to fill, for buckets that name no sender of their own.
        rank: the one that this is for.
        world_size: number of trainer ranks.

    Raises:
        UnsupportedError: ranks hold parts of a tensor that overlap without being the same, and none holds all of it.
    """

    def __init__(self, plan: Plan, senders: Sequence[int], rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._senders = tuple(senders)
        self._holders = {spec.name: holders_of(spec) for spec in plan.specs}
        self._load_nbytes = [0] * world_size
        self.buckets: tuple[BucketGather, ...] = tuple(
            BucketGather() if bucket.pulled else self._bucket(bucket) for bucket in plan.buckets
        )

    @cached_property
    def traffic_nbytes(self) -> int:
        """Bytes that this rank sends to others in one sync, packets without their padding."""
        return sum(
            part.nbytes for bucket in self.buckets for _, index in bucket.sends for part in bucket.packets[index].parts
        )

    def _bucket(self, bucket: Bucket) -> BucketGather:
        own: list[Part] = []
        outgoing: dict[int, list[Part]] = {}
        incoming: dict[int, list[Part]] = {}
        exchanged = False
        senders = self._senders if bucket.sender is None else (bucket.sender,)
        for tensor in bucket.tensors:
            holders = self._holders[tensor.name]
            for region, ranks in holders.items():
                parts: list[Part] | None = None
                for sender, source in self._routes(tensor, region, ranks, senders):
                    exchanged |= sender != source
                    if self._rank not in (sender, source):
                        continue
                    parts = _parts(tensor, region) if parts is None else parts
                    if source == sender:
                        own += parts
                    elif source == self._rank:
                        outgoing.setdefault(sender, []).extend(parts)
                    else:
                        incoming.setdefault(source, []).extend(parts)
        packets, sends = _share(outgoing)
        return BucketGather(
            own=tuple(own),
            packets=packets,
            sends=sends,
            receives=tuple((source, Packet.of(p)) for source in sorted(incoming) for p in _grouped(incoming[source])),
            exchanged=exchanged,
        )

    def _routes(
        self, tensor: TensorMeta, region: Region, ranks: Sequence[int], senders: Sequence[int]
    ) -> list[tuple[int, int]]:
        """(sender, the rank that it gets `region` from) for every sender; counts the load of the sources."""
        if not tensor.is_whole:
            low, high = region.bounds
            first, last = tensor.elements.bounds
            if low >= last or high <= first:
                return []
        routes = []
        nbytes = min(region.numel * tensor.dtype.itemsize, tensor.chunk_nbytes)
        for sender in senders:
            source = sender
            if sender not in ranks:
                source = min(ranks, key=lambda rank: (self._load_nbytes[rank], rank))
                self._load_nbytes[source] += nbytes
            routes.append((sender, source))
        return routes


def holders_of(spec: TensorSpec) -> dict[Region, tuple[int, ...]]:
    """Disjoint coalesced regions that cover the tensor, each with the ranks that hold it.

    Raises as `GatherPlan`.
    """
    ranks: dict[Region, list[int]] = {}
    for owner in spec.owners:
        region = owner.region.coalesce()
        if region.numel and owner.rank not in ranks.setdefault(region, []):
            ranks[region].append(owner.rank)
    disjoint = without_overlaps(ranks, spec.numel)
    if ranks and not disjoint:
        raise UnsupportedError(
            f"{spec.name}: trainer ranks {sorted({owner.rank for owner in spec.owners})} hold parts that overlap "
            f"without being the same; shard it alike on all of them"
        )
    return {region: tuple(holders) for region, holders in disjoint.items()}


def without_overlaps(by_region: Mapping[Region, T], numel: int) -> Mapping[Region, T]:
    """All of the different regions of a tensor; if some overlap, those that are all of it: there may be none."""
    if sum(region.numel for region in by_region) <= numel:
        return by_region
    return {region: held for region, held in by_region.items() if region.numel == numel}


def _parts(tensor: TensorMeta, owner: Region) -> list[Part]:
    """What `owner` gives to this chunk."""
    if tensor.is_whole:
        pairs = [(Region.whole(owner.sizes), owner)]
    else:
        shared = owner.intersect(tensor.elements)
        pairs = aligned(
            (ordinals for region in shared for ordinals in owner.locate(region)),
            (region.translate(-tensor.elements.offset) for region in shared),
        )
    return [Part(tensor=tensor, owner=owner, source=source, slot=slot) for source, slot in pairs]


def _grouped(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts by packet: the small ones together, large ones that lie contiguous in the slot each alone."""
    together: list[Part] = []
    alone = []
    for part in parts:
        large = part.nbytes >= IN_PLACE_BYTES and part.slot.run_length == part.slot.numel
        if large:
            alone.append([part])
        else:
            together.append(part)
    return [together, *alone] if together else alone


def _share(by_sender: dict[int, list[Part]]) -> tuple[tuple[Packet, ...], tuple[tuple[int, int], ...]]:
    """A packet for each different list of parts, and who gets which."""
    packets: list[Packet] = []
    known: dict[tuple[int, ...], int] = {}
    sends = []
    for sender in sorted(by_sender):
        for parts in _grouped(by_sender[sender]):
            key = tuple(id(part) for part in parts)
            if key not in known:
                known[key] = len(packets)
                packets.append(Packet.of(parts))
            sends.append((sender, known[key]))
    return tuple(packets), tuple(sends)


def align(nbytes: int) -> int:
    """The next multiple of the alignment of parts."""
    return -(-nbytes // PACKET_ALIGNMENT_BYTES) * PACKET_ALIGNMENT_BYTES


def aligned(first: Iterable[Region], second: Iterable[Region]) -> list[tuple[Region, Region]]:
    """Two enumerations of equally many elements as pairs of regions with equal sizes, element to element."""
    left, right = deque(first), deque(second)
    pairs = []
    while left:
        one, other = left.popleft(), right.popleft()
        count = min(one.numel, other.numel)
        if one.numel != other.numel:
            left.extendleft(reversed(_cut(one, count)))
            right.extendleft(reversed(_cut(other, count)))
            continue
        pair = _alike(one, other)
        if pair is not None:
            pairs.append(pair)
        else:
            rows = [
                Region(one.offset + row * one.strides[0], one.sizes[1:], one.strides[1:]) for row in range(one.sizes[0])
            ]
            left.extendleft(reversed(rows))
            right.appendleft(other)
    return pairs


def _cut(region: Region, count: int) -> list[Region]:
    """The first `count` elements, then the others."""
    ranges = (Region.span(0, count), Region.span(count, region.numel - count))
    return [piece for ordinals in ranges for piece in region.select(ordinals)]


def _alike(one: Region, other: Region) -> tuple[Region, Region] | None:
    """Both with the same sizes; None if the rows of neither fit evenly into the other's."""
    one, other = one.coalesce(), other.coalesce()
    left, right = (list(zip(region.sizes, region.strides, strict=True)) for region in (one, other))
    dims: deque[tuple[int, int, int]] = deque()
    while left and right:
        (size, stride), (other_size, other_stride) = left.pop(), right.pop()
        common = min(size, other_size)
        if size % common or other_size % common:
            return None
        dims.appendleft((common, stride, other_stride))
        if size > common:
            left.append((size // common, stride * common))
        elif other_size > common:
            right.append((other_size // common, other_stride * common))
    sizes = tuple(size for size, _, _ in dims)
    return (
        Region(one.offset, sizes, tuple(stride for _, stride, _ in dims)),
        Region(other.offset, sizes, tuple(stride for _, _, stride in dims)),
    )
