"""Which ranks work together."""

from collections.abc import Sequence

from integrations.ppo.errors import ConflictError


def engine_groups(world_size: int, tp_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Ranks that share an engine, which are neighbours, and ranks with the same place in theirs: (TP, DP) groups.

    Raises `ConflictError`, a `ValueError`, if `tp_size` is no divisor of `world_size`.
    """
    if tp_size < 1 or world_size % tp_size:
        raise ConflictError(f"{world_size} ranks are no multiple of an engine's {tp_size}")
    parallel = [list(range(first, first + tp_size)) for first in range(0, world_size, tp_size)]
    return parallel, [list(range(place, world_size, tp_size)) for place in range(tp_size)]


def own_slice(lengths: Sequence[int], place: int) -> slice:
    """Where what came from one rank lies after everybody's was put together: `lengths` by place."""
    start = sum(lengths[:place])
    return slice(start, start + lengths[place])
