"""Offload of FSDP2 modules (`fully_shard`): the shards leave, after unsharded parameters were given up."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel

from wsync.adapters.trainers.fsdp import reshard
from wsync.errors import MemoryStateError, UnsupportedError
from wsync.memory.host_pool import HostPool
from wsync.memory.model_tensors import model_tensors, with_gradients
from wsync.memory.offload import Offload
from wsync.memory.resident import Resident

_GROUP = ("fsdp_params", "offload_policy", "_training_state")


class FSDPMemory:
    """See `wsync.memory.residents.TrainerMemory`. Optimizers of FSDP2 parameters are plain ones with DTensor states."""

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is a module with FSDP2 modules in it."""
        if not isinstance(obj, nn.Module) or any(isinstance(m, FullyShardedDataParallel) for m in obj.modules()):
            return False
        return any(isinstance(module, FSDPModule) for module in obj.modules())

    @staticmethod
    def resident(name: str, model: nn.Module, pool: HostPool) -> Resident:
        """See `TrainerMemory`. `check_release` refuses parameters under a `CPUOffloadPolicy`."""
        _groups(model)
        return Offload(
            name,
            partial(_tensors, model),
            pool,
            check=partial(_check, name, model),
            prepare=partial(reshard, model),
        )


def _groups(module: nn.Module) -> list[Any]:
    """FSDP2's parameter groups. Raises `UnsupportedError` by name if this version of torch keeps something else."""
    groups: list[Any] = []
    for child in module.modules():
        if isinstance(child, FSDPModule):
            state: Any = child._get_fsdp_state()
            found = getattr(state, "_fsdp_param_groups", None)
            groups += [getattr(state, "_fsdp_param_group", None)] if found is None else found
    groups = [group for group in groups if group is not None]
    missing = sorted({name for group in groups for name in _GROUP if not hasattr(group, name)})
    if missing:
        raise UnsupportedError(
            f"FSDP2 of torch {torch.__version__} keeps no {', '.join(missing)}, which wsync reads to offload a module; "
            f"use a torch version that wsync was tested with"
        )
    return groups


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Shards and what FSDP2 does not manage. What is registered while unsharded is given up before they leave."""
    unsharded = set()
    for group in _groups(module):
        for managed in group.fsdp_params:
            yield from with_gradients([managed.sharded_param])
            unsharded.add(id(getattr(managed, "_unsharded_param", None)))
    yield from (tensor for tensor in model_tensors(module) if id(tensor) not in unsharded)


def _check(name: str, module: nn.Module) -> None:
    for group in _groups(module):
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            raise UnsupportedError(
                f"{name} was sharded with a CPUOffloadPolicy: its parameters are in host memory already, and on the "
                f"device only while they are used; leave it out"
            )
        if group._training_state.name != "IDLE":
            raise MemoryStateError(
                f"{name} is in the middle of a {group._training_state.name.lower()} pass; finish it, then release"
            )
