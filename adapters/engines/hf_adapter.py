"""The loader of a Hugging Face model under PEFT LoRA: it takes the tensors of an adapter, and leaves the base alone."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wsync.adapters.engines.hf_loader import HFLoader
from wsync.adapters.trainers.lora_adapter import adapter_names, adapter_scalings, layer_prefix
from wsync.adapters.trainers.lora_layers import Tuned, examine, is_tuned, model_inside
from wsync.adapters.trainers.names import held_tensors, modules_by_prefix
from wsync.errors import MismatchError


def loader_for(model: nn.Module, checkpoint: Path | None = None) -> HFLoader:
    """The loader of `model`: for its active LoRA adapter if it has one, else for its weights; see `HFLoader`.

    Raises `UnsupportedError` as that and, for adapters, as `examine`.
    """
    return HFAdapterLoader(model) if is_tuned(model) else HFLoader(model, checkpoint)


def entrances(model: nn.Module) -> list[nn.Module]:
    """The modules of which one is called by every forward: PEFT's `generate` goes past its own model."""
    if not is_tuned(model):
        return [model]
    inner = model_inside(model)
    return [model] if inner is model else [model, inner]


class HFAdapterLoader(HFLoader):
    """Takes what a trainer sends with `lora="adapter"`, by the names of PEFT's files, into the active adapter."""

    whole = False

    def __init__(self, model: nn.Module) -> None:
        """Raises `UnsupportedError` unless one adapter is active, and as `examine`."""
        from peft import __version__

        self.engine = f"peft {__version__}"
        self._model = weakref.ref(model)
        self._scalings: dict[str, torch.Tensor] = {}
        tuned = self._tuned()
        device = next(model.parameters()).device
        for name, term in adapter_scalings(tuned).items():
            self._scalings[name] = torch.tensor(term.scaling, device=device)
        self.targets()

    def targets(self) -> Mapping[str, torch.Tensor]:
        """The adapter's parameters, and a stand-in for each scaling, which is no tensor in PEFT."""
        held = held_tensors(self._live())
        return {name: held[raw].tensor for name, raw in adapter_names(self._tuned()).items()} | self._scalings

    def required(self) -> Sequence[str]:
        """All of it."""
        return list(self.targets())

    def accepts(self, name: str) -> bool:
        """Adapters have no buffers."""
        return False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor to its place. Raises `MismatchError` for an unknown name or a wrong shape."""
        targets = self.targets()
        with torch.no_grad():
            for name, tensor in weights:
                target = targets.get(name)
                if target is None:
                    raise MismatchError(
                        f"{name}: the active adapter has no such tensor. The engine's model has LoRA layers and takes "
                        f"an adapter alone, SyncConfig(lora='adapter'); for merged weights pass a model without them"
                    )
                if target.shape != tensor.shape:
                    raise MismatchError(
                        f"{name}: its shape is {list(tensor.shape)}, the engine's adapter wants {list(target.shape)}"
                    )
                target.copy_(tensor)

    def launch_weights(self) -> None:
        """No checkpoint is known of it."""

    def finish(self) -> None:
        """Give the layers the scalings that came."""
        modules: Mapping[str, Any] = dict(modules_by_prefix(self._live()))
        for name, term in adapter_scalings(self._tuned()).items():
            modules[layer_prefix(term)].scaling[term.adapter] = float(self._scalings[name])

    def _tuned(self) -> Tuned:
        model = self._live()
        return examine(model, list(held_tensors(model)))
