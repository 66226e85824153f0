"""FSDP2 over a transformers model."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from integrations.ppo.errors import ConflictError


def shard(
    model: Any, device: torch.device, *, bf16: bool, mesh: DeviceMesh | None = None, cpu_offload: bool = False
) -> Any:
    """*Collective.* `fully_shard` each decoder layer, then the rest.

    Args:
        model: all of it, on every rank.
        device: where it computes.
        bf16: what it computes in.
        mesh: which ranks share a copy; default: all.
        cpu_offload: its shards, gradients and optimizer states stay in host memory.
    """
    if not cpu_offload:
        model.to(device)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy(),
    }
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def copies(world_size: int, size: int, device: torch.device) -> DeviceMesh | None:
    """*Collective.* A copy of a model in each `size` neighbours: ranks as `[copies, size]`; None for one copy.

    Raises `ConflictError` if `size` is neither 0 nor a divisor of `world_size`.
    """
    if size in (0, world_size):
        return None
    if size < 0 or world_size % size:
        raise ConflictError(f"a copy of a model in each {size} ranks: no divisor of {world_size} ranks")
    return init_device_mesh(device.type, (world_size // size, size), mesh_dim_names=("copies", "shards"))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks that transformers names as those that are not to be split."""
    names = getattr(model, "_no_split_modules", None) or ()
    return [module for module in model.modules() if type(module).__name__ in names]
