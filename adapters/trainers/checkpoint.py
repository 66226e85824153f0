"""Producer for a folder of safetensors: weights that another program trained, streamed from disk into engines."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from wsync.adapters.trainers.checkpoint_folder import Stamp, find_files, is_tied, mapped, stamps
from wsync.adapters.trainers.exchange import Piece
from wsync.adapters.trainers.names import Held, Source
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.errors import MismatchError, first_five
from wsync.group import Group
from wsync.plan import Bucket, Owner, Plan, TensorSpec
from wsync.regions import Region

_CUT_ELEMENTS = 4096
"""Shares end at multiples of this, or at the end of a tensor: whole words for digests, whole pages for most dtypes."""


class CheckpointProducer(ShardedProducer):
    """Exports `model.safetensors`, or the files of its index, by the names that are in them.

    Files are mapped, not loaded: bytes are read as buckets are filled. Several trainer ranks read one contiguous share
    of it each, so that every byte is read once; the folder must be the same for all of them. A new checkpoint
    at the same path is new weights for the next sync. It must not be written while a sync runs: write it elsewhere and
    rename.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises as `find_files`."""
        self._folder = Path(folder).absolute()
        find_files(self._folder)
        self._nothing = nn.Module()  # the base class holds what it exports weakly
        super().__init__(self._nothing)
        self._kind = f"checkpoint {self._folder}"
        self._stamps: Mapping[Path, Stamp | None] = {}
        self._names: Set[str] = frozenset()

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is a path."""
        return isinstance(obj, (str, Path))

    def prepare(self, plan: Plan, senders: Sequence[int], group: Group) -> None:
        """See `wsync.Producer`. Every rank could read everything; here each is given its share."""
        if group.world_size > 1:
            plan = Plan(
                specs=_shares(plan.specs, group.world_size), buckets=plan.buckets, bucket_bytes=plan.bucket_bytes
            )
            self._pieces = {
                (spec.name, owner.region.coalesce()): Piece(parent=spec.name, local=owner.region)
                for spec in plan.specs
                for owner in spec.owners
                if owner.rank == group.rank
            }
        super().prepare(plan, senders, group)

    def open(self) -> None:
        """See `wsync.Producer`. Maps the files as they are now. Raises `MismatchError` if their tensors are others."""
        self._stamps = stamps(sorted(find_files(self._folder)))
        super().open()
        odd = sorted(self._layouts.keys() ^ self._names)
        if odd:
            self.close()
            raise MismatchError(
                f"{self._folder} had {len(self._layouts)} tensors at connect and has {len(self._names)} now; they "
                f"differ in {first_five(odd)}; connect again"
            )

    def references(self, bucket: Bucket) -> Sequence[torch.Tensor] | None:
        """See `wsync.Producer`. Raises as `stage`."""
        found = super().references(bucket)
        if found is not None:
            self._check_unchanged()
        return found

    def stage(self, bucket: Bucket, slot: torch.Tensor | None) -> None:
        """See `wsync.Producer`. Raises `MismatchError` if a file was written since `open`."""
        self._check_unchanged()
        super().stage(bucket, slot)

    def confirm(self) -> bool:
        """See `wsync.Producer`. Raises as `stage`: pulled, files are read without a word."""
        self._check_unchanged()
        return super().confirm()

    def _held(self, module: nn.Module) -> Mapping[str, Held]:
        tensors = mapped(self._folder)
        self._names = tensors.keys()
        return {
            name: Held(tensor=tensor, shape=tuple(tensor.shape), optional=False) for name, tensor in tensors.items()
        }

    def _sources(self, module: nn.Module, held: Mapping[str, Held]) -> list[Source]:
        tied = is_tied(self._folder)
        return [
            Source(
                name=name,
                shape=item.shape,
                parent=name,
                region=Region.whole(item.shape),
                optional=tied and name == "lm_head.weight" and len(held) > 1,
            )
            for name, item in held.items()
        ]

    def _check_unchanged(self) -> None:
        changed = [file.name for file, stamp in stamps(list(self._stamps)).items() if self._stamps[file] != stamp]
        if changed:
            raise MismatchError(
                f"{self._folder} was written while a sync read it: {first_five(changed)}; write checkpoints elsewhere "
                f"and rename them, then sync again"
            )


def _shares(specs: Sequence[TensorSpec], world_size: int) -> tuple[TensorSpec, ...]:
    """`specs` with other owners: rank r has the r-th part of all elements, in order."""
    total = sum(spec.numel for spec in specs)
    edges = [total * rank // world_size for rank in range(world_size)] + [total]
    shared, start = [], 0
    for spec in specs:
        cuts = [_cut(edge - start, spec.numel) for edge in edges]
        owners = [
            Owner(rank=rank, region=Region.span(low, high - low))
            for rank, (low, high) in enumerate(pairwise(cuts))
            if high > low
        ]
        shared.append(replace(spec, owners=tuple(owners)))
        start += spec.numel
    return tuple(shared)


def _cut(position: int, numel: int) -> int:
    """The nearest place up to `position` at which a tensor may be cut."""
    return numel if position >= numel else max(0, position // _CUT_ELEMENTS * _CUT_ELEMENTS)
