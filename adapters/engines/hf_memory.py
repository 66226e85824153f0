"""Sleep for a plain module: its storages are emptied in place, and every parameter object stays."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from wsync.memory import storages
from wsync.memory.host import trim


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
                storages.bytes_of(block.storage).copy_(block.kept)
        self._blocks = []


def release(model: nn.Module, *, keep_weights: bool) -> Released:
    """Free the device memory of every parameter and buffer of `model`.

    Buffers are always kept in host memory: no sync brings the non-persistent ones back. Parameters are kept only
    with `keep_weights`. If there is no room for the copies nothing was changed.
    """
    own_memory(model)
    buffers = {tensor.untyped_storage()._cdata for tensor in model.buffers()}
    blocks = [
        _Block(storage, storage.nbytes(), _to_host(storage) if keep_weights or key in buffers else None)
        for key, storage in storages.storages_of(_tensors(model)).items()
    ]
    for block in blocks:
        block.storage.resize_(0)
    _give_back({block.storage.device.type for block in blocks})
    return Released(blocks)


def own_memory(model: nn.Module) -> None:
    """Move parameters and buffers that lie in a mapped checkpoint file into memory of their own; objects stay."""
    storages.own_memory(_tensors(model))


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter and buffer object once."""
    yield from model.parameters()
    yield from model.buffers()


def _give_back(devices: set[str]) -> None:
    """Allocators keep what is freed; hand it on to whoever needs it."""
    if "cuda" in devices:
        torch.cuda.empty_cache()
    if "cpu" in devices:
        trim()


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    return storages.bytes_of(storage).to("cpu", copy=True)
