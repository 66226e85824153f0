"""FSDP2 over a transformers model."""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(model: Any, device: torch.device, *, bf16: bool) -> Any:
    """*Collective.* `fully_shard` each decoder layer, then the rest. `bf16` is what it computes in."""
    model.to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    for layer in decoder_layers(model):
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks that transformers names as those that are not to be split."""
    names = getattr(model, "_no_split_modules", None) or ()
    return [module for module in model.modules() if type(module).__name__ in names]
