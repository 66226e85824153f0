"""Producer for FSDP2 (`fully_shard`), tensor parallelism, and any other module with DTensor parameters."""

import math
import weakref
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from wsync.adapters.trainers.watching import WatchingProducer
from wsync.errors import UnsupportedError
from wsync.regions import Region


class FSDPProducer(WatchingProducer):
    """Exports local shards: 1-D and 2-D meshes, HSDP, uneven shards, any shard dim, FSDP2 over tensor parallelism.

    Parameters that are no DTensor count as replicated.
    """

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is a module with FSDP2 modules or DTensor parameters in it."""
        if not isinstance(obj, nn.Module) or any(isinstance(m, FullyShardedDataParallel) for m in obj.modules()):
            return False
        sharded = any(True for _ in fsdp_modules(obj))
        return sharded or any(isinstance(parameter, DTensor) for parameter in obj.parameters())

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._sharding: Sequence[weakref.ref[FSDPModule]] = ()

    def _settle(self, module: nn.Module) -> None:
        self._sharding = [weakref.ref(child) for child in fsdp_modules(module)]
        self._settle_again()

    def _settle_again(self) -> None:
        for ref in self._sharding:
            if (child := ref()) is not None:
                child.reshard()

    @staticmethod
    def _memory(tensor: torch.Tensor) -> torch.Tensor:
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

    def _local(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Hashable]:
        if not isinstance(tensor, DTensor):
            return super()._local(tensor)
        return tensor.to_local(), (tensor.placements, tensor.device_mesh)

    def _region(self, name: str, tensor: torch.Tensor, local: torch.Tensor) -> Region:
        if not isinstance(tensor, DTensor):
            return super()._region(name, tensor, local)
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return Region.span(0, 0)
        starts, sizes = shard_box(name, tensor.shape, mesh.shape, coordinate, tensor.placements)
        if tuple(local.shape) != sizes and 0 not in sizes:
            raise UnsupportedError(
                f"{name} {list(tensor.shape)}: rank at {list(coordinate)} of mesh {list(mesh.shape)} holds "
                f"{list(local.shape)}, but {list(tensor.placements)} make it {list(sizes)}"
            )
        return Region.box(tensor.shape, starts, sizes)


def reshard(module: nn.Module) -> None:
    """After a forward without gradients the root keeps its full parameters registered; make it the shards again."""
    for child in fsdp_modules(module):
        child.reshard()


def fsdp_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Those of FSDP2 in `module`."""
    return (child for child in module.modules() if isinstance(child, FSDPModule))


def shard_box(
    name: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First index and size, dim by dim, of the shard at one coordinate of a mesh. Arithmetic only.

    Each mesh axis cuts what is left into ceil-sized chunks, so the last ones may be shorter or empty. Axes cut in
    order, but for `_StridedShard`: that one cuts after all later axes that shard the same dim.

    Args:
        name: of the tensor, for errors.
        shape: of the full tensor.
        mesh_shape: size of each mesh axis.
        coordinate: place on each mesh axis.
        placements: one a mesh axis.

    Raises:
        UnsupportedError: a partial sum, another placement that is no shard or replica, or a split factor that is
            not the number of shards of the later axes.
    """
    starts, sizes = [0] * len(shape), list(shape)
    for axis in _cutting_order(name, mesh_shape, placements):
        placement = placements[axis]
        assert isinstance(placement, (Shard, _StridedShard))
        dim = placement.dim
        chunk = -(-sizes[dim] // mesh_shape[axis])
        skipped = min(coordinate[axis] * chunk, sizes[dim])
        starts[dim] += skipped
        sizes[dim] = min(chunk, sizes[dim] - skipped)
    return tuple(starts), tuple(sizes)


def _cutting_order(name: str, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """Mesh axes that shard, in the order in which they cut."""
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if isinstance(placement, _StridedShard):
            inner = [later for later in order if getattr(placements[later], "dim", None) == placement.dim]
            shards = math.prod(mesh_shape[later] for later in inner)
            if placement.split_factor != shards:
                raise UnsupportedError(
                    f"{name}: mesh axis {axis} has {placement!r}, whose split factor should be {shards}, the number of "
                    f"shards that later axes make of dim {placement.dim}; placements are {list(placements)}"
                )
            order.append(axis)
        elif isinstance(placement, Shard):
            order.insert(0, axis)
        elif not isinstance(placement, Replicate):
            raise UnsupportedError(
                f"{name} is {placement!r} on mesh axis {axis}; only shards and replicas can be exported, "
                f"placements are {list(placements)}. Reduce it first"
            )
    return order
