"""How trainers bring FSDP2 shards to an engine beside each rank today.

full_tensor each     gathered and cast tensor by tensor, a handle and a call for each (verl, OpenRLHF)
packed all-gather    no engine: shards cast into a buffer, gathered bucket by bucket, and left there
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from wsync.bench.gpu.loops import send_one


def send_full_tensors(engine: Any, actor: nn.Module, dtype: torch.dtype) -> None:
    """*Collective.* Every tensor of `actor`, as `dtype`, into the engine of this rank."""
    for name, parameter in actor.named_parameters():
        assert isinstance(parameter, DTensor)
        send_one(engine, name, parameter.full_tensor().detach().to(dtype))


def packed_gather(actor: nn.Module, dtype: torch.dtype, bucket_bytes: int) -> Callable[[], None]:
    """What gathers all tensors of `actor` as `dtype` on every rank, when all ranks call it."""
    world = dist.get_world_size()
    buckets: list[list[torch.Tensor]] = [[]]
    numel = 0
    for parameter in actor.parameters():
        assert isinstance(parameter, DTensor)
        shard: torch.Tensor = parameter.to_local().detach()
        if numel and (numel + shard.numel()) * world * dtype.itemsize > bucket_bytes:
            buckets.append([])
            numel = 0
        buckets[-1].append(shard)
        numel += shard.numel()
    most = max(sum(shard.numel() for shard in bucket) for bucket in buckets)
    packed = torch.empty(most, dtype=dtype, device="cuda")
    gathered = torch.empty(most * world, dtype=dtype, device="cuda")

    def run() -> None:
        for bucket in buckets:
            places, count = [], 0
            for shard in bucket:
                places.append(packed[count : count + shard.numel()])
                count += shard.numel()
            torch._foreach_copy_(places, [shard.reshape(-1) for shard in bucket])
            dist.all_gather_into_tensor(gathered[: count * world], packed[:count])

    return run
