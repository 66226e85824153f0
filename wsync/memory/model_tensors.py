"""Which tensors make up a model, and which an optimizer's state."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def model_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter, buffer and gradient object of `module` once. Lazy ones have no memory yet and are left out."""
    yield from with_gradients(module.parameters())
    yield from (buffer for buffer in module.buffers() if not is_lazy(buffer))


def with_gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each of `parameters`, then its gradient if it has one."""
    for parameter in parameters:
        if not is_lazy(parameter):
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Every tensor in `optimizer.state`, however deep. None before the first step."""
    for state in optimizer.state.values():
        yield from _tensors_in(state)


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(inner)
