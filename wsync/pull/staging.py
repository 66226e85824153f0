"""Parts that cross a link between devices in the engine's dtype: their owner casts them first, into memory beside."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from wsync.copies import Copies
from wsync.device_work import DeviceTimer
from wsync.errors import TransportError
from wsync.gather import aligned
from wsync.plan import ALIGNMENT_BYTES, Bucket
from wsync.protocols.loader import Manifest
from wsync.pull import holders
from wsync.pull.exports import Export, Share, Shares
from wsync.regions import Region
from wsync.topology import CPU
from wsync.views import Pair, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Casts:
    """What one rank casts at every sync."""

    of: tuple[Share, ...] = ()
    """All that the rank has of the bucket."""

    staged: tuple[Share, ...] = ()
    """Parts of it, in a memory that comes after those of the rank."""

    pairs: tuple[Pair, ...] = ()
    """From the rank's memories to that one, as memory 0."""

    nbytes: int = 0
    """Of that memory."""

    wanted_nbytes: int = 0
    """The same if there were no limit."""


def plan_casts(
    bucket: Bucket, exports: Sequence[Export], rank: int, workers: Sequence[Manifest], limit_bytes: int
) -> Casts:
    """What `rank` casts for `workers`: the parts that they will read of it over a link, in a narrower dtype.

    What several of them read alike is cast once. Parts beyond `limit_bytes` cross as they are.
    """
    held = exports[rank]
    staged: list[Share] = []
    pairs: list[Pair] = []
    nbytes = wanted_nbytes = 0
    behind = [
        worker
        for worker in workers
        if limit_bytes
        and holders.crosses_link(held.endpoint, worker.endpoint)
        and any(_narrower(share, bucket, worker) for share in held.parts)
    ]
    wanted = _wanted(bucket, holders.Holders(bucket, exports), rank, behind) if behind else {}
    for (tensor, region, dtype), share in sorted(wanted.items(), key=lambda item: item[0][0]):
        taken = -(-region.numel * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        wanted_nbytes += taken
        if nbytes + taken > limit_bytes:
            continue
        there = Region.whole(region.sizes).translate(nbytes // dtype.itemsize)
        staged.append(
            Share(tensor=tensor, elements=region, place=Place(memory=len(held.addresses), dtype=dtype, region=there))
        )
        pairs += _pairs(share, region, Place(memory=0, dtype=dtype, region=there))
        nbytes += taken
    return Casts(of=held.parts, staged=tuple(staged), pairs=tuple(pairs), nbytes=nbytes, wanted_nbytes=wanted_nbytes)


def _wanted(
    bucket: Bucket, known: holders.Holders, rank: int, workers: Sequence[Manifest]
) -> Mapping[tuple[int, Region, torch.dtype], Share]:
    """Tensor, elements and dtype of what is read of `rank` and worth a cast, and in which share they lie."""
    wanted: dict[tuple[int, Region, torch.dtype], Share] = {}
    for worker in workers:
        for tensor, holdings in enumerate(known.choose(worker.endpoint)):
            name = bucket.tensors[tensor].name
            for holding in holdings:
                if holding.export != rank or not holding.over_link or not _narrower(holding.share, bucket, worker):
                    continue
                for use in worker.uses[name]:
                    for region in use.intersect(holding.share.elements):
                        wanted[tensor, region.coalesce(), worker.dtypes[name]] = holding.share
    return wanted


def _narrower(share: Share, bucket: Bucket, worker: Manifest) -> bool:
    """Whether `worker` takes fewer bytes of these elements than the rank has."""
    dtype = worker.dtypes.get(bucket.tensors[share.tensor].name)
    return dtype is not None and dtype.itemsize < share.place.dtype.itemsize


def _pairs(share: Share, region: Region, target: Place) -> Iterator[Pair]:
    """Copies of the elements `region` out of `share`."""
    places = (there for o in share.elements.locate(region) for there in share.place.region.select(o))
    for there, here in aligned(places, [target.region]):
        yield replace(share.place, region=there), replace(target, region=here)


class Staging:
    """The memory of `Casts`: made when it is filled first, and kept."""

    def __init__(self, casts: Casts | None = None, device: torch.device = CPU) -> None:
        """`device`: where the rank's weights are. Without `casts` nothing is ever staged."""
        self.casts = casts or Casts()
        self._device = device
        self._copies = Copies(self.casts.pairs, device=device)
        self._memory: torch.Tensor | None = None
        self._timer = DeviceTimer(device)

    @property
    def seconds(self) -> float:
        """What the device took for the last `fill`, once it is done; 0 if that staged nothing."""
        return self._timer.seconds

    @property
    def held_bytes(self) -> int:
        """Bytes that are held now."""
        return 0 if self._memory is None else self._memory.numel()

    @property
    def missing_bytes(self) -> int:
        """Bytes that the next `fill` will allocate."""
        return self.casts.nbytes - self.held_bytes

    @torch.no_grad()
    def fill(self, shares: Shares) -> Shares:
        """Cast on the current stream of the device. Returns `shares` with what is staged of them.

        The staged parts of the last time are overwritten. Of other shares than the casts were planned for none are
        staged. Raises `TransportError` if there is no memory for it.
        """
        self._timer = DeviceTimer(self._device)
        if not self.casts.staged or shares.parts != self.casts.of:
            return shares
        if self._memory is None:
            self._memory = self._allocate()
        self._timer.begin()
        self._copies.run(shares.memories, [self._memory])
        self._timer.end()
        return replace(shares, memories=[*shares.memories, self._memory], staged=self.casts.staged)

    def release(self) -> None:
        """Give the memory back. No worker may have it mapped."""
        self._memory = None

    def _allocate(self) -> torch.Tensor:
        try:
            return torch.empty(self.casts.nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise TransportError(
                f"{self.casts.nbytes} bytes on {self._device}, to cast weights before they cross to other devices, "
                f"are not to be had: lower staging_bytes, 0 does without"
            ) from error
