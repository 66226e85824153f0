"""Parameters that were replaced between two syncs while something else, an optimizer say, keeps the old ones alive."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import wsync
from wsync.testing.ranks import Rank, run_ranks


class Net(nn.Module):
    """A model that is taken for one that generates."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = nn.Linear(32, 48), nn.Linear(48, 8)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


def same(actor: nn.Module, engine: nn.Module) -> bool:
    return all(torch.equal(a, e) for a, e in zip(actor.parameters(), engine.parameters(), strict=True))


@pytest.mark.parametrize("verify", [None, "digest"])
def test_the_new_parameter_is_synced(verify: Any) -> None:
    actor, engine, config = Net(1), Net(2), wsync.SyncConfig(verify=verify)
    wsync.sync(actor, engine, config=config)
    old = actor.head.weight
    for version, weight in enumerate([nn.Parameter(torch.randn_like(old)), old], start=2):
        actor.head.weight = weight
        assert wsync.sync(actor, engine, config=config).version == version
        assert same(actor, engine)


def replace_on_one_rank(me: Rank) -> list[int]:
    actor, engine = Net(1), Net(2) if me.rank == 0 else None
    versions = [wsync.sync(actor, engine).version]
    kept = actor.head.weight
    if me.rank == 1:
        actor.head.weight = nn.Parameter(kept.detach().clone())
    versions += [wsync.sync(actor, engine).version for _ in range(2)]
    assert engine is None or same(actor, engine)
    return versions


def test_all_ranks_do_the_sync_again_if_one_of_them_trusted_wrongly() -> None:
    assert run_ranks(replace_on_one_rank, 2, timeout_s=120) == [[1, 2, 3]] * 2


def replace_shards(me: Rank) -> list[int]:
    """A parameter is replaced, and then the memory behind another one, while the old ones live on."""
    actor, engine = Net(1), Net(2) if me.rank == 0 else None
    fully_shard(actor, mesh=init_device_mesh("cpu", (me.world_size,)))
    versions = [wsync.sync(actor, engine).version for _ in range(2)]
    head, body = actor.head.weight, actor.body.weight
    assert isinstance(head, DTensor)
    assert isinstance(body, DTensor)
    local = torch.randn_like(head.to_local())
    kept: list[Any] = [head, body._local_tensor]
    actor.head.weight = nn.Parameter(DTensor.from_local(local, head.device_mesh, head.placements))
    versions.append(wsync.sync(actor, engine).version)
    check_full(actor, engine)
    with torch.no_grad():
        body._local_tensor = torch.randn_like(body._local_tensor)
    versions.append(wsync.sync(actor, engine).version)
    check_full(actor, engine)
    del kept
    return versions


def check_full(actor: nn.Module, engine: nn.Module | None) -> None:
    full = [parameter.full_tensor() for parameter in actor.parameters() if isinstance(parameter, DTensor)]
    assert len(full) == 4
    if engine is not None:
        assert all(torch.equal(one, other) for one, other in zip(full, engine.parameters(), strict=True))


def test_shards_that_were_replaced_are_synced() -> None:
    assert run_ranks(replace_shards, 2, timeout_s=120) == [[1, 2, 3, 4]] * 2
