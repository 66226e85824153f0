"""Offload of FSDP1 modules: the sharded flat parameters leave, after unsharded ones were given up."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from wsync.errors import MemoryStateError, UnsupportedError
from wsync.memory.host_pool import HostPool
from wsync.memory.model_tensors import model_tensors
from wsync.memory.offload import Offload
from wsync.memory.resident import Resident
from wsync.memory.storages import inner_tensors

_HANDLE = ("flat_param", "uses_sharded_strategy", "_training_state", "_offload_params")
_SHARDED = ("_local_shard", "_saved_grad_shard")
_GIVEN_UP = ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard")
"""Attributes of a flat parameter that hold what FSDP1 makes anew from the shards."""


class FSDP1Memory:
    """See `wsync.memory.residents.TrainerMemory`. Optimizers of FSDP1 parameters are plain ones."""

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is a module with FSDP1 modules in it."""
        return isinstance(obj, nn.Module) and any(isinstance(m, FullyShardedDataParallel) for m in obj.modules())

    @staticmethod
    def resident(name: str, model: nn.Module, pool: HostPool) -> Resident:
        """See `TrainerMemory`. `check_release` refuses parameters under `CPUOffload(offload_params=True)`."""
        _handles(model)
        return Offload(
            name,
            partial(_tensors, model),
            pool,
            check=partial(_check, name, model),
            prepare=partial(_give_up, model),
        )


def _handles(module: nn.Module) -> list[tuple[FullyShardedDataParallel, Any]]:
    """Each FSDP1 module that has parameters with its handle. Raises `UnsupportedError` if torch keeps others."""
    found: list[tuple[FullyShardedDataParallel, Any]] = []
    for child in module.modules():
        handle = getattr(child, "_handle", None) if isinstance(child, FullyShardedDataParallel) else None
        if isinstance(child, FullyShardedDataParallel) and handle is not None:
            missing = [name for name in _HANDLE if not hasattr(handle, name)]
            if missing:
                raise UnsupportedError(
                    f"FSDP1 of torch {torch.__version__} keeps no {', '.join(missing)}, which wsync reads to offload "
                    f"a module; use fully_shard (FSDP2), or a torch version that wsync was tested with"
                )
            found.append((child, handle))
    return found


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Shards, their gradients and what FSDP1 does not manage, in whatever state it is."""
    given_up = set()
    for _, handle in _handles(module):
        flat = handle.flat_param
        for attribute in _GIVEN_UP:
            tensor = getattr(flat, attribute, None)
            if tensor is not None and tensor.untyped_storage().nbytes():
                given_up.add(tensor.untyped_storage()._cdata)
        found = [flat, flat.grad, *(getattr(flat, attribute, None) for attribute in _SHARDED)]
        yield from (t for t in found if t is not None and t.untyped_storage()._cdata not in given_up)
    rest = inner_tensors(model_tensors(module))
    yield from (tensor for tensor in rest if tensor.untyped_storage()._cdata not in given_up)


def _check(name: str, module: nn.Module) -> None:
    for _, handle in _handles(module):
        if handle._offload_params:
            raise UnsupportedError(
                f"{name} was wrapped with CPUOffload(offload_params=True): its parameters are in host memory already, "
                f"and on the device only while they are used; leave it out"
            )
        if handle._training_state.name != "IDLE":
            state = handle._training_state.name.lower().replace("_", " ")
            raise MemoryStateError(f"{name} is in the middle of {state}; finish it, then release")


def _give_up(module: nn.Module) -> None:
    """Free unsharded and low-precision parameters: after a forward without gradients the root keeps them."""
    from torch.distributed.fsdp._runtime_utils import _reshard

    for child, handle in _handles(module):
        if hasattr(handle.flat_param, "_local_shard"):  # not before the first forward
            _reshard(child, handle, handle.uses_sharded_strategy)
