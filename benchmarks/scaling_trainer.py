"""The trainers of `benchmarks.scaling`: how they are sharded, how they get new weights, and how they are gathered."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.scaling_layouts import Trainer
from wsync.bench.gpu import models


class ShardedActor:
    """A model in fp32 over all ranks of the default group.

    Attributes:
        module: what is synced.
    """

    def __init__(self, kind: Trainer, config: Any, device: torch.device) -> None:
        """*Collective.* With the weights of seed 1."""
        self._kind, self._config, self._device = kind, config, device
        full = models.make_actor(config, torch.float32, 1, str(device))
        self.shapes = {name: tuple(tensor.shape) for name, tensor in models.engine_side(full)}
        self.module = _zero3(full) if kind == "zero3" else _fsdp2(full, kind, device)

    @torch.no_grad()
    def renew(self, seed: int) -> nn.Module:
        """*Collective.* Give the shards new weights. Returns the same model whole, in bf16."""
        full = models.make_actor(self._config, torch.float32, seed, str(self._device))
        for (_, own), (_, whole) in zip(self.module.named_parameters(), full.named_parameters(), strict=True):
            if isinstance(own, DTensor):
                # Everybody has the same values: each keeps its part, and nothing is sent.
                part = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
                own.to_local().copy_(part.to_local())
            else:
                _fill_partition(own, whole)
        return full.to(torch.bfloat16)

    def gather_each(self) -> Callable[[], None]:
        """What gathers tensor by tensor and casts, on every rank: the least that a loop over parameters does."""
        parameters = list(self.module.parameters())

        def run() -> None:
            for parameter in parameters:
                if isinstance(parameter, DTensor):
                    parameter.full_tensor().detach().to(torch.bfloat16)
                else:
                    with _gathered([parameter]):
                        parameter.detach().to(torch.bfloat16)

        return run


def _fsdp2(model: nn.Module, kind: Trainer, device: torch.device) -> nn.Module:
    """Each decoder layer, and what is left. HSDP: two copies of the shards."""
    world = dist.get_world_size()
    mesh = (
        init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("copies", "shards"))
        if kind == "hsdp"
        else init_device_mesh(device.type, (world,))
    )
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _zero3(model: nn.Module) -> nn.Module:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine: nn.Module = import_module("deepspeed").initialize(model=model, optimizer=optimizer, config=config)[0]
    return engine


def _fill_partition(own: Any, whole: torch.Tensor) -> None:
    """DeepSpeed gives each rank so many elements of the flattened tensor, the last one perhaps fewer."""
    partition = own.ds_tensor
    start = dist.get_rank() * partition.numel() if partition.numel() < whole.numel() else 0
    part = whole.reshape(-1)[start : start + partition.numel()]
    partition.view(-1)[: part.numel()].copy_(part)


def _gathered(parameters: list[Any]) -> Any:
    return import_module("deepspeed").zero.GatheredParameters(parameters)
