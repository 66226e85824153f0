"""How trainers export FSDP2 parameters today: one collective a parameter, on the trainer's own group.

Both loops are what RL trainers run before they hand tensors to an engine; copying into a bucket is left out.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch.distributed.tensor import DTensor


@torch.no_grad()
def gather_then_cast(parameters: Iterable[DTensor], dtype: torch.dtype) -> None:
    """Gather each parameter in the trainer's dtype, then cast the full tensor. Every rank must call it."""
    for parameter in parameters:
        parameter.full_tensor().to(dtype)


@torch.no_grad()
def cast_then_gather(parameters: Iterable[DTensor], dtype: torch.dtype) -> None:
    """Cast each shard, then gather it in the wire dtype. Every rank must call it."""
    for parameter in parameters:
        cast(DTensor, parameter.to(dtype)).full_tensor()
