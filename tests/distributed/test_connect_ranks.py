"""`wsync.connect` from several real trainer ranks, some of which missed a call before."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import wsync
from wsync.testing.ranks import Rank, run_ranks

CONFIG = wsync.SyncConfig(bucket_bytes=4096, timeout_s=20.0)
SHORT = wsync.SyncConfig(bucket_bytes=4096, timeout_s=1.0)

Ranks = dict[str, Any]
"""How `connect` is told of them; nothing means the default process group."""


class Net(nn.Linear):
    """Taken for a model that generates."""

    def __init__(self, seed: int) -> None:
        super().__init__(32, 48)
        with torch.no_grad():
            self.weight.copy_(torch.randn(self.weight.shape, generator=torch.Generator().manual_seed(seed)))

    def generate(self) -> None:
        """Never called."""


def works(me: Rank, ranks: Ranks) -> None:
    """All meet, and what the engine gets is what the actor has."""
    actor, engine = Net(1), None if me.rank else Net(2)
    with wsync.connect(actor, engine, config=CONFIG, **ranks) as session:
        session.sync()
    assert engine is None or torch.equal(actor.weight, engine.weight)


def stays_away(me: Rank, ranks: Ranks) -> None:
    if me.rank != 1:
        with pytest.raises(wsync.RankError, match=r"rank\(s\) \[1\] did not reach phase 'connect'"):
            wsync.connect(Net(1), None, config=SHORT, **ranks)


def raises_before_it_meets_the_others(me: Rank, ranks: Ranks) -> None:
    config: Any = "fast" if me.rank == 1 else SHORT
    with pytest.raises((wsync.ConfigError, wsync.RankError), match=r"config is a str|did not reach phase .connect"):
        wsync.connect(Net(1), None, config=config, **ranks)


def raises_where_all_hear_it(me: Rank, ranks: Ranks) -> None:
    with pytest.raises((wsync.UnsupportedError, wsync.RankError), match="nothing here can serve"):
        wsync.connect(Net(1), object() if me.rank == 1 else None, config=CONFIG, **ranks)


WAYS: tuple[Callable[[Rank, Ranks], None], ...] = (
    stays_away,
    raises_before_it_meets_the_others,
    raises_where_all_hear_it,
)


def miss_some(me: Rank, explicit: bool) -> int:
    """How many words about failures are in the store then."""
    ranks = {"rank": me.rank, "world_size": me.world_size, "store": me.store} if explicit else {}
    for miss in WAYS:
        for _ in range(2):
            miss(me, ranks)
            dist.barrier()
        works(me, ranks)
    gc.collect()
    works(me, ranks)
    dist.barrier()
    return sum("failed" in key for key in me.store.list_keys())


@pytest.mark.parametrize("explicit", [False, True], ids=["default group", "ranks and store"])
def test_a_rank_that_missed_a_connect_meets_the_others_in_the_next(explicit: bool) -> None:
    assert run_ranks(miss_some, 3, explicit, timeout_s=120) == [0] * 3
