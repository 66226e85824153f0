"""Tensors that lie in other memory, as data: what a table of copies is made from, and what a loader is shown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch

from wsync.errors import ProtocolError
from wsync.regions import Region
from wsync.runs import IntArray
from wsync.strided import memory_view


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Elements in one of several memories."""

    memory: int
    """Index of the memory."""

    dtype: torch.dtype
    """Of the elements. The memory itself may be a tensor of bytes."""

    region: Region
    """Positions of the elements, counted in elements of `dtype` from the first byte of the memory. Its sizes are the
    shape of the tensor."""

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The elements as a tensor of the region's sizes, outside of autograd. No copy."""
        return memory_view(as_dtype(memory.detach(), self.dtype), self.region)


Pair = tuple[Place, Place]
"""Source and target of a copy, of equal sizes: element i of the one goes to element i of the other, cast if dtypes
differ."""

Dim = tuple[int, int, int]
"""Of a pair: its size, and the strides of source and target."""


def outer_dims(pair: Pair) -> tuple[list[Dim], int]:
    """The dims over runs that are contiguous on both sides, and the elements of each run."""
    source, target = pair
    dims = [
        dim
        for dim in zip(source.region.sizes, source.region.strides, target.region.strides, strict=True)
        if dim[0] != 1
    ]
    length = 1
    while dims and dims[-1][1:] == (length, length):
        length *= dims.pop()[0]
    return dims, length


def first_elements(pair: Pair, dims: Sequence[Dim]) -> tuple[IntArray, IntArray]:
    """Positions of the first element of each run, at the source and at the target, in the order of the elements."""
    source, target = pair
    froms = np.full(1, source.region.offset, np.int64)
    tos = np.full(1, target.region.offset, np.int64)
    for size, source_stride, target_stride in dims:
        steps = np.arange(size, dtype=np.int64)
        froms = (froms[:, None] + steps * source_stride).reshape(-1)
        tos = (tos[:, None] + steps * target_stride).reshape(-1)
    return froms, tos


def extents(places: Sequence[Place], num_memories: int) -> list[int]:
    """Bytes of each memory, from its first one to the last that any of `places` needs."""
    sizes = [0] * num_memories
    for place in places:
        sizes[place.memory] = max(sizes[place.memory], place.region.bounds[1] * place.dtype.itemsize)
    return sizes


class Views(Sequence[torch.Tensor]):
    """The tensors of a bucket where they lie. Each is made only when it is asked for: there may be thousands.

    Attributes:
        memories: what the tensors lie in.
        places: one a tensor. The same tuple every time for the same bucket of the same sender.
        key: the same object for as long as the memories are where they were, on the devices where they were; None if
            nobody knows.
    """

    def __init__(
        self, memories: Sequence[torch.Tensor], places: tuple[Place, ...], *, key: object | None = None
    ) -> None:
        self.memories, self.places, self.key = memories, places, key

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> "Views":
        """Tensors of any origin, each as a memory of its own, or as a copy if its memory shows something else."""
        if isinstance(tensors, cls):
            return tensors
        tensors = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
        places = tuple(
            Place(memory=index, dtype=tensor.dtype, region=Region(0, tuple(tensor.shape), tensor.stride()))
            for index, tensor in enumerate(tensors)
        )
        return cls(tuple(tensors), places)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(index, slice):
            return Views(self.memories, self.places[index], key=self.key)
        place = self.places[index]
        return place.view(self.memories[place.memory])

    def __len__(self) -> int:
        return len(self.places)


def as_dtype(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`memory` itself if it has `dtype`; bytes as that dtype, without those at the end that make no element.

    Raises `ProtocolError` for memory of a third dtype: its bytes mean something else.
    """
    if memory.dtype == dtype:
        return memory
    if memory.dtype != torch.uint8:
        raise ProtocolError(f"elements of {dtype} are expected in memory of {memory.dtype}")
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
