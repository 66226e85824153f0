"""Every producer passes the producer kit: a plain module alone, and DTensor shards on two ranks."""

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from wsync.adapters.trainers.fsdp import FSDPProducer
from wsync.adapters.trainers.module import ModuleProducer
from wsync.group import Group
from wsync.protocols import Producer
from wsync.testing.producer_conformance import PRODUCER_CHECKS, ProducerBench
from wsync.testing.ranks import Rank, run_ranks

Tensors = Mapping[str, torch.Tensor]


class Bag(nn.Module):
    """Any tensors as persistent buffers, which take every dtype."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            owner: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_buffer(leaf, tensor)


_bags: dict[int, Bag] = {}


def keep(producer: Producer, bag: Bag) -> Producer:
    """Producers hold their module weakly: somebody must hold it."""
    _bags[id(producer)] = bag
    return producer


def make_plain(tensors: Tensors) -> Producer:
    bag = Bag(tensors)
    return keep(ModuleProducer(bag), bag)


def change_plain(producer: Producer, tensors: Tensors) -> None:
    for name, buffer in _bags[id(producer)].named_buffers():
        if 0 in buffer.stride() and buffer.numel() > 1:
            buffer.as_strided((buffer.shape[-1],), (1,)).copy_(tensors[name][0])  # expanded: one row
        else:
            buffer.copy_(tensors[name])


def local_part(tensor: torch.Tensor) -> tuple[torch.Tensor, Placement]:
    """This rank's shard along the last dim that is longer than one; small tensors are replicated."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
    if not dims or math.prod(tensor.shape) == 0:
        return tensor.clone(), Replicate()
    dim = dims[-1]
    chunk = -(-tensor.shape[dim] // dist.get_world_size())
    start = min(dist.get_rank() * chunk, tensor.shape[dim])
    length = min(chunk, tensor.shape[dim] - start)
    return tensor.narrow(dim, start, length).clone(), Shard(dim)


def make_sharded(tensors: Tensors) -> Producer:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    shards = {}
    for name, tensor in tensors.items():
        local, placement = local_part(tensor)
        stride = torch.empty(tensor.shape, device="meta").stride()
        shards[name] = DTensor.from_local(local, mesh, [placement], run_check=False, shape=tensor.shape, stride=stride)
    bag = Bag(shards)
    return keep(FSDPProducer(bag), bag)


def change_sharded(producer: Producer, tensors: Tensors) -> None:
    for name, buffer in _bags[id(producer)].named_buffers():
        assert isinstance(buffer, DTensor)
        buffer.to_local().copy_(local_part(tensors[name])[0])


def all_checks_on_a_rank(me: Rank) -> list[str]:
    for check in PRODUCER_CHECKS:
        group = Group(me.rank, me.world_size, PrefixStore(check.__name__, me.store), 30.0)
        check(ProducerBench(make=make_sharded, change=change_sharded, group=group))
        group.close()
    return [check.__name__ for check in PRODUCER_CHECKS]


@pytest.mark.parametrize("check", PRODUCER_CHECKS, ids=lambda check: check.__name__)
def test_a_plain_module(check: Callable[[ProducerBench], None]) -> None:
    check(ProducerBench(make=make_plain, change=change_plain, group=Group(0, 1, None, 5.0)))


def test_dtensor_shards_on_two_ranks() -> None:
    names = [check.__name__ for check in PRODUCER_CHECKS]
    assert run_ranks(all_checks_on_a_rank, 2, timeout_s=180) == [names, names]
