"""Where an engine's parameters lie. They must stay there: CUDA graphs may have captured their addresses."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from wsync.errors import EngineStateError, first_five
from wsync.glance import Glance, Watch
from wsync.plan import TensorSpec
from wsync.protocols import Loader, Manifest
from wsync.targets import Targets
from wsync.traits import any_inference
from wsync.walk import named_tensors
from wsync.worker import Worker


class Places:
    """The tensors of a model by name, and the addresses that its parameters had when somebody connected."""

    def __init__(self, engine: str) -> None:
        """`engine`: its name, for messages."""
        self._engine = engine
        self._watch = Watch()
        self._seen: Sequence[Hashable] = ()
        self._numbers: Mapping[str, int] = {}
        self._inference = False
        self._settled: Sequence[Hashable] = ()
        self._addresses: Mapping[str, int] = {}
        self._laid_out: Mapping[str, Hashable] = {}

    def tensors(self, model: nn.Module) -> Targets:
        """Parameters and buffers, tied ones once."""
        return self._named(self._look(model).tensors)

    def recall(self) -> Targets | None:
        """`tensors` as `settle` saw them, if they are still there; whether they are still the model's it cannot tell:
        `confirm` it once they are written, before anything is derived from them."""
        tensors = self._watch.recall() if self._seen is self._settled else None
        return None if tensors is None else self._named(tensors)

    def settle(self, model: nn.Module) -> None:
        """A new connection: wherever parameters lie now is where they must stay."""
        self._look(model)
        self._settled = self._seen
        self._addresses = _addresses(model)
        self._laid_out = _laid_out(model)

    def check(self, model: nn.Module, when: str) -> Targets:
        """`tensors`, with one look for both.

        Raises `EngineStateError` if a parameter has moved, and at every later sync until somebody connects anew.
        """
        glance = self._look(model)
        if self._seen is not self._settled:
            now = _addresses(model)
            moved = [name for name, address in self._addresses.items() if now.get(name) != address]
            if moved:
                raise EngineStateError(
                    f"{self._engine} moved {len(moved)} parameter(s) {when}: {first_five(moved)}. CUDA graphs may "
                    f"still read the old memory: restart the engine, or, if it captured none, connect again"
                )
        return self._named(glance.tensors)

    def confirm(self, model: nn.Module, written: Targets) -> None:
        """Raise `EngineStateError` if `written` came from `recall`, and is not what `model` consists of."""
        if written.key is self._settled and self.check(model, "while it loaded").key is not self._settled:
            now = _laid_out(model)
            lost = [name for name, layout in self._laid_out.items() if now.get(name) != layout]
            if lost:
                raise EngineStateError(
                    f"{self._engine} replaced {len(lost)} tensor(s) since it was connected: {first_five(lost)}. What "
                    f"arrived went to the old ones; sync again"
                )

    def _look(self, model: nn.Module) -> Glance:
        """A glance, and names anew if it shows anything that the last one did not."""
        glance = self._watch.look(model)
        if glance.key != self._seen:
            numbers = {id(tensor): number for number, tensor in enumerate(glance.tensors)}
            self._numbers = {name: numbers[id(tensor)] for name, tensor, _ in named_tensors(model)}
            with torch._C.DisableTorchFunctionSubclass():
                self._inference = any_inference(glance.tensors)
            self._seen = glance.key
        return glance

    def _named(self, tensors: Sequence[torch.Tensor]) -> Targets:
        return Targets(self._numbers, tensors, key=self._seen, inference=self._inference)


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


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor, is_parameter in named_tensors(model) if is_parameter}


def _laid_out(model: nn.Module) -> dict[str, Hashable]:
    """Where each tensor lies and how."""
    return {
        name: (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        for name, tensor, _ in named_tensors(model)
    }
