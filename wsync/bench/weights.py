"""Random weights that any process can make again, tensor by tensor, from a seed."""

from collections.abc import Iterator

import torch
from torch import nn

from wsync.bench.cases import Shapes

ACTOR_SEED = 1
ENGINE_SEED = 2
"""What the engine holds before the first sync: other numbers than the actor's."""


def random_tensors(shapes: Shapes, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of a case, rounded from normal fp32 numbers. Equal for equal seeds, in every process."""
    for index, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator().manual_seed(seed << 32 | index)
        yield name, torch.randn(shape, generator=generator).to(dtype)


def random_module(shapes: Shapes, seed: int, dtype: torch.dtype) -> nn.Module:
    """A module with these parameters, nested as their names say. It has no forward."""
    root = nn.Module()
    for name, tensor in random_tensors(shapes, seed, dtype):
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(tensor))
    return root
