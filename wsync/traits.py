"""What thousands of tensors look like, without a step of the interpreter for each of them."""

from collections.abc import Sequence
from operator import attrgetter

import torch

_DTYPE, _SHAPE, _ON_CPU = attrgetter("dtype"), attrgetter("shape"), attrgetter("is_cpu")

Traits = tuple[Sequence[torch.dtype], Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]
"""Dtypes, shapes and strides, one each a tensor."""


def traits(tensors: Sequence[torch.Tensor]) -> Traits:
    """Dtypes, shapes and strides of plain tensors."""
    return list(map(_DTYPE, tensors)), list(map(_SHAPE, tensors)), list(map(torch.Tensor.stride, tensors))


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where the first element of each plain tensor lies."""
    return list(map(torch.Tensor.data_ptr, tensors))


def all_on_cpu(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all of them are in host memory."""
    return all(map(_ON_CPU, tensors))


def any_inference(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any of them was made in inference mode."""
    return any(map(torch.Tensor.is_inference, tensors))
