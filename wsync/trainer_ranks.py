"""Who the trainer's ranks are, and groups of wsync's own among them."""

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from wsync.errors import ConfigError
from wsync.group import Group


def trainer_ranks(rank: int | None, world_size: int | None, store: Store | None) -> tuple[int, int, Store | None]:
    """What the user said, else the default process group, else a world of one, which needs no store."""
    if (rank is None) != (world_size is None):
        raise ConfigError("connect takes rank and world_size together, and a store with them if world_size > 1")
    if rank is None or world_size is None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return 0, 1, None
        return dist.get_rank(), dist.get_world_size(), _get_default_store()
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in a world of {world_size}")
    if world_size > 1 and store is None:
        raise ConfigError(f"a session of {world_size} trainer ranks needs store=, which all of them reach")
    return rank, world_size, store if world_size > 1 else None


def group_of(rank: int, world_size: int, store: Store | None, name: str, timeout_s: float) -> Group:
    """The group called `name` of these ranks."""
    if store is None:
        return Group(rank, world_size, None, timeout_s)
    return Group(rank, world_size, PrefixStore(f"wsync/{name}", store), timeout_s)


def new_group(
    kind: str, timeout_s: float, rank: int | None = None, world_size: int | None = None, store: Store | None = None
) -> Group:
    """A group for one more object of a `kind` that every rank makes. The ranks are as `trainer_ranks` says."""
    rank, world_size, store = trainer_ranks(rank, world_size, store)
    number = store.add(f"wsync/numbers/{kind}/{rank}", 1) if store is not None else 0
    return group_of(rank, world_size, store, f"{kind}/{number}", timeout_s)
