"""Which ranks share an engine, and what goes around among them."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from integrations.ppo.errors import ConflictError

T = TypeVar("T")


def engine_groups(world_size: int, tp_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Ranks that share an engine, which are neighbours, and ranks with the same place in theirs: (TP, DP) groups.

    Raises `ConflictError`, a `ValueError`, if `tp_size` is no divisor of `world_size`.
    """
    if tp_size < 1 or world_size % tp_size:
        raise ConflictError(f"--engine_tp_size {tp_size} is no divisor of {world_size} ranks")
    parallel = [list(range(first, first + tp_size)) for first in range(0, world_size, tp_size)]
    return parallel, [list(range(place, world_size, tp_size)) for place in range(tp_size)]


class EngineGroup:
    """The ranks that share this rank's engine."""

    def __init__(self, tp_size: int) -> None:
        """*Collective.* Raises as `engine_groups`; a first all-reduce shows that the ranks reach each other."""
        parallel, _ = engine_groups(dist.get_world_size(), tp_size)
        groups = [dist.new_group(ranks, backend="gloo") for ranks in parallel]
        self._group = groups[dist.get_rank() // tp_size]
        self.place = dist.get_rank() % tp_size
        self.size = tp_size
        count = torch.ones(())
        dist.all_reduce(count, group=self._group)
        if int(count) != tp_size:
            raise ConflictError(f"{int(count)} ranks answered in a group of {tp_size}")

    def gather(self, items: Sequence[T]) -> tuple[list[T], slice]:
        """*Collective.* Everybody's items in the order of ranks, and where this rank's are."""
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, list(items), group=self._group)
        start = sum(map(len, said[: self.place]))
        return [item for some in said for item in some], slice(start, start + len(items))

    def from_first(self, item: T | None) -> T:
        """*Collective.* What the first rank of the group passed."""
        said = [item]
        dist.broadcast_object_list(said, group=self._group, group_src=0)
        found: Any = said[0]
        return found  # type: ignore[no-any-return]
