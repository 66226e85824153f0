"""Residents for the models and optimizers that trainers make. Frameworks' own ways are found as producers are."""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import nn

from wsync.errors import UnsupportedError
from wsync.memory.host_pool import HostPool
from wsync.memory.model_tensors import model_tensors, optimizer_tensors
from wsync.memory.offload import Offload
from wsync.memory.resident import Resident

_MODELS = (
    "wsync.adapters.trainers.deepspeed_memory:DeepSpeedModelMemory",
    "wsync.adapters.trainers.fsdp1_memory:FSDP1Memory",
    "wsync.adapters.trainers.fsdp_memory:FSDPMemory",
)
"""Asked in this order; "module:class". What none of them takes is offloaded as a plain module."""

_OPTIMIZERS = ("wsync.adapters.trainers.deepspeed_memory:DeepSpeedOptimizerMemory",)


class TrainerMemory(Protocol):
    """A framework that keeps the memory of a model or an optimizer in ways of its own."""

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is of this framework's. Cheap, and imports no framework."""
        ...

    @staticmethod
    def resident(name: str, obj: Any, pool: HostPool) -> Resident:
        """What offloads an object that matches. Raises `UnsupportedError` if there is no way."""
        ...


def resident_for_model(name: str, model: object, pool: HostPool) -> Resident:
    """What offloads `model`: its parameters, buffers and gradients, with every object kept.

    Args:
        name: unique among residents, for messages.
        model: a module, plain or with LoRA adapters, FSDP1 or FSDP2, or a DeepSpeed engine.
        pool: host memory that it goes to.

    Raises:
        UnsupportedError: nothing here can offload that; what can be told only later comes from `check_release`.
    """
    adapter = _adapter_for(model, _MODELS)
    if adapter is not None:
        return adapter.resident(name, model, pool)
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"the model {name} is a {_kind(model)}; a torch.nn.Module (plain, FSDP1, FSDP2) or a "
            f"deepspeed.DeepSpeedEngine can be offloaded"
        )
    return Offload(name, partial(model_tensors, model), pool)


def resident_for_optimizer(name: str, optimizer: object, pool: HostPool) -> Resident:
    """What offloads the state of `optimizer`; state that appears later is found at the next release.

    Args:
        name: unique among residents, for messages.
        optimizer: a `torch.optim.Optimizer`, or the DeepSpeed engine that has it.
        pool: host memory that it goes to.

    Raises:
        UnsupportedError: as `resident_for_model`.
    """
    adapter = _adapter_for(optimizer, _OPTIMIZERS)
    if adapter is not None:
        return adapter.resident(name, optimizer, pool)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"the optimizer {name} is a {_kind(optimizer)}; the state of a torch.optim.Optimizer, or of the optimizer "
            f"in a deepspeed.DeepSpeedEngine, can be offloaded"
        )
    return Offload(name, partial(optimizer_tensors, optimizer), pool)


def _adapter_for(obj: object, targets: Sequence[str]) -> TrainerMemory | None:
    for target in targets:
        module, _, attribute = target.partition(":")
        adapter: TrainerMemory = getattr(import_module(module), attribute)
        if adapter.matches(obj):
            return adapter
    return None


def _kind(obj: object) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"
