"""Sleep for a plain module: its storages are emptied in place, and every parameter object stays."""

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class _Block:
    """One storage, however many parameters and buffers share it."""

    storage: torch.UntypedStorage
    nbytes: int
    kept: torch.Tensor | None
    """Its bytes in host memory, uint8 `[nbytes]`; None if they were dropped."""


class Released:
    """Memory that a model gave away. Holds the emptied storages, not the model."""

    def __init__(self, blocks: list[_Block]) -> None:
        self._blocks = blocks

    @property
    def nbytes(self) -> int:
        """Bytes that were released on the model's device."""
        return sum(block.nbytes for block in self._blocks)

    def restore(self) -> None:
        """Allocate every storage again and put back what was kept; the rest is uninitialised. Addresses may change."""
        for block in self._blocks:
            block.storage.resize_(block.nbytes)
            if block.kept is not None:
                _bytes(block.storage).copy_(block.kept)
        self._blocks = []


def release(model: nn.Module, *, keep_weights: bool) -> Released:
    """Free the device memory of every parameter and buffer of `model`.

    Buffers are always kept in host memory: no sync brings the non-persistent ones back. Parameters are kept only
    with `keep_weights`. If there is no room for the copies nothing was changed.
    """
    own_memory(model)
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in _tensors(model)}
    buffers = {tensor.untyped_storage()._cdata for tensor in model.buffers()}
    blocks = [
        _Block(storage, storage.nbytes(), _to_host(storage) if keep_weights or key in buffers else None)
        for key, storage in storages.items()
    ]
    for block in blocks:
        block.storage.resize_(0)
    _give_back({block.storage.device.type for block in blocks})
    return Released(blocks)


def own_memory(model: nn.Module) -> None:
    """Move tensors that lie in memory of fixed size into storages of their own, under the same tensor objects.

    `from_pretrained` leaves parameters as views into the mapped checkpoint file. They cannot be freed one by one, and
    whoever overwrites the file changes them.
    """
    moved: dict[int, torch.UntypedStorage] = {}
    kept_alive = []  # an address is no identity once its storage is freed
    with torch.no_grad():
        for tensor in _tensors(model):
            old = tensor.untyped_storage()
            if old.resizable():
                continue
            kept_alive.append(old)
            new = moved.get(old._cdata)
            if new is None:
                new = moved[old._cdata] = _bytes(old).clone().untyped_storage()
            place = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = place.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter and buffer object once."""
    yield from model.parameters()
    yield from model.buffers()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _give_back(devices: set[str]) -> None:
    """Allocators keep what is freed; hand it on to whoever needs it."""
    if "cuda" in devices:
        torch.cuda.empty_cache()
    if "cpu" in devices:
        with suppress(AttributeError, OSError):  # a C library other than glibc
            ctypes.CDLL(None).malloc_trim(0)


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    return _bytes(storage).to("cpu", copy=True)
