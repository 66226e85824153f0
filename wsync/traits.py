"""What thousands of tensors look like, without a step of the interpreter for each of them."""

from collections.abc import Collection, Sequence
from itertools import compress
from operator import attrgetter, not_

import torch

_DTYPE, _SHAPE, _ON_CPU = attrgetter("dtype"), attrgetter("shape"), attrgetter("is_cpu")

Traits = tuple[Sequence[torch.dtype], Sequence[tuple[int, ...]], Sequence[bool], Sequence[tuple[int, ...]]]
"""Dtypes and shapes, whether each is contiguous, and the strides of those that are not."""


def traits(tensors: Sequence[torch.Tensor]) -> Traits:
    """What plain tensors look like. Strides of all would take as long again, and the garbage collector with them."""
    contiguous = list(map(torch.Tensor.is_contiguous, tensors))
    strides = list(map(torch.Tensor.stride, compress(tensors, map(not_, contiguous))))
    return dtypes(tensors), shapes(tensors), contiguous, strides


def dtypes(tensors: Sequence[torch.Tensor]) -> list[torch.dtype]:
    """Dtypes."""
    return list(map(_DTYPE, tensors))


def shapes(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Shapes."""
    return list(map(_SHAPE, tensors))


def numels(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of elements."""
    return list(map(torch.Tensor.numel, tensors))


def all_contiguous(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all of them have their elements in a row."""
    return all(map(torch.Tensor.is_contiguous, tensors))


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where the first element of each plain tensor lies."""
    return list(map(torch.Tensor.data_ptr, tensors))


def all_on_cpu(tensors: Collection[torch.Tensor]) -> bool:
    """Whether all of them are in host memory."""
    return all(map(_ON_CPU, tensors))


def cuda_devices(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    """CUDA devices that any of them lie on."""
    return [torch.device("cuda", index) for index in sorted(set(device_numbers(tensors))) if index >= 0]


def device_numbers(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Which device of its kind each of them is on; -1 for host memory."""
    return list(map(torch.Tensor.get_device, tensors))


def any_bits(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the memory of any of them holds the conjugate or the negative of what it shows."""
    any_complex = any(dtype.is_complex for dtype in set(dtypes(tensors)))
    return any(map(torch.Tensor.is_neg, tensors)) or (any_complex and any(map(torch.Tensor.is_conj, tensors)))


def any_inference(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any of them was made in inference mode."""
    return any(map(torch.Tensor.is_inference, tensors))
