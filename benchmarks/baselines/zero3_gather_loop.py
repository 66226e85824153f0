"""How trainers export ZeRO-3 parameters today: `GatheredParameters`, one by one or all at once.

Copying into a bucket is left out.
"""

from collections.abc import Sequence
from importlib import import_module

import torch
from torch import nn


@torch.no_grad()
def gather_each(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
    """Gather each parameter, cast it, and let it be partitioned again. Every rank must call it."""
    zero = import_module("deepspeed").zero
    for parameter in parameters:
        with zero.GatheredParameters([parameter]):
            parameter.to(dtype)


@torch.no_grad()
def gather_all(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
    """Gather all parameters together, which takes the memory of the whole model on every rank; then cast each."""
    zero = import_module("deepspeed").zero
    with zero.GatheredParameters(list(parameters)):
        for parameter in parameters:
            parameter.to(dtype)
