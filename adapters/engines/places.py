"""Where an engine's parameters lie. They must stay there: CUDA graphs may have captured their addresses."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from wsync.errors import EngineStateError, first_five
from wsync.plan import TensorSpec
from wsync.protocols import Loader, Manifest
from wsync.walk import named_tensors
from wsync.worker import Worker


class Places:
    """The addresses that parameters had when somebody connected."""

    def __init__(self, engine: str) -> None:
        """`engine`: its name, for messages."""
        self._engine = engine
        self._addresses: Mapping[str, int] = {}

    def settle(self, model: torch.nn.Module) -> None:
        """A new connection: wherever parameters lie now is where they must stay."""
        self._addresses = _addresses(model)

    def check(self, model: torch.nn.Module, when: str) -> None:
        """Raises `EngineStateError` if one has moved, and at every later sync until somebody connects anew."""
        now = _addresses(model)
        moved = [name for name, address in self._addresses.items() if now.get(name) != address]
        if moved:
            raise EngineStateError(
                f"{self._engine} moved {len(moved)} parameter(s) {when}: {first_five(moved)}. CUDA graphs may still "
                f"read the old memory: restart the engine, or, if it captured none, connect again"
            )


class SettlingLoader(Loader, Protocol):
    """A loader whose parameters must stay where they are."""

    def settle(self) -> None:
        """See `Places`."""
        ...


class SettlingWorker(Worker):
    """A worker that lets its loader take note of where parameters lie at every connect."""

    def __init__(self, loader: SettlingLoader, rank: int) -> None:
        super().__init__(loader, rank=rank)
        self._settling = loader

    def _examine(self, specs: Sequence[TensorSpec], void: bool) -> Manifest:
        self._settling.settle()
        return super()._examine(specs, void)


def _addresses(model: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor, is_parameter in named_tensors(model) if is_parameter}
