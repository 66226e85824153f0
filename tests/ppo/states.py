"""One number for all that a run knows."""

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from integrations.ppo.checkpoint import random_states
from integrations.ppo.shards import shards
from integrations.ppo.strategy.roles import Role
from integrations.ppo.trainer import Trainer


def digest(trainer: Trainer) -> dict[str, str]:
    """*Collective.* Of this rank, part by part: roles with their modes, optimizers, the trainer's and random states."""
    parts: dict[str, Any] = {"trainer": trainer.state_dict(), "random": random_states()}
    strategy = trainer.strategy
    strategy.enter("train")
    for name, role in strategy.roles.items():
        with strategy.loaded(role) if role.optimizer is None else nullcontext():
            parts[name] = _hash(_weights(role))
        parts[f"{name} modes"] = [module.training for module in role.model.modules()]
        if role.optimizer is not None:
            parts[f"{name} optimizer"] = _optimizer_states(role)
            parts[f"{name} scheduler"] = role.scheduler.state_dict()
    return {name: _hash(part) for name, part in parts.items()}


def _weights(role: Role) -> list[torch.Tensor]:
    """Under ZeRO-3 whole ones: what fills up a rank's part of a small one is whatever was in memory."""
    if not _is_zero3(role):
        return [*shards(role.model), *(one for one in role.model.parameters() if not one.requires_grad)]
    return [import_module("deepspeed.utils").safe_get_full_fp32_param(one) for one in role.model.parameters()]


def _optimizer_states(role: Role) -> Any:
    """Under ZeRO-3 they have the same filling, and the weights of the next step show them."""
    if _is_zero3(role):
        return None
    return getattr(role.optimizer, "optimizer", role.optimizer).state_dict()  # of a DeepSpeed engine its own


def _is_zero3(role: Role) -> bool:
    return hasattr(role.model, "zero_optimization_stage") and role.model.zero_optimization_stage() == 3


def _hash(value: Any) -> str:
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        found.update(f"{local.dtype}{tuple(local.shape)}".encode())
        found.update(local.detach().clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            found.update(str(key).encode())
            _feed(found, value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            _feed(found, one)
    else:
        found.update(repr(value).encode())
