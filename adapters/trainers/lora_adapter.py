"""An adapter alone: what a file of PEFT's holds, by the names that it has there, and how strongly it is applied."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from wsync.adapters.trainers.lora import combined
from wsync.adapters.trainers.lora_layers import Term, Tuned, examine, is_tuned
from wsync.adapters.trainers.names import Held, Source, as_held
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.errors import UnsupportedError, first_five
from wsync.plan import TensorSpec

PREFIX = "base_model.model."
"""Before every name in a file of PEFT's."""

SCALING = "lora_scaling"
"""Beside `lora_A` and `lora_B` of a layer: a float32 scalar, the factor of their product. No file of PEFT's has it."""


class AdapterProducer(ShardedProducer):
    """Exports the active adapter of a module under PEFT LoRA: A, B, scalings, magnitudes and copies of whole modules.

    All tensors of a layer are one atomic group.
    """

    # Scalings are tensors that are made at each look: no glance would know them again.
    _look_quickly = ShardedProducer._look_quickly
    _look_closely = ShardedProducer._look_closely
    confirm = ShardedProducer.confirm

    def __new__(cls, module: nn.Module) -> "AdapterProducer":
        """A producer for the way in which `module` is sharded."""
        return cast("AdapterProducer", super().__new__(combined(cls, module)))

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is a PEFT model, or a module with PEFT's layers in it."""
        return is_tuned(obj)

    def metadata(self) -> Sequence[TensorSpec]:
        """See `wsync.Producer`. Raises `UnsupportedError` unless one adapter is active, and as `examine`."""
        return [replace(spec, atomic_group=layer_of(spec.name)) for spec in super().metadata()]

    def _held(self, module: nn.Module) -> Mapping[str, Held]:
        held = super()._held(module)
        tuned = examine(module, list(held))
        found = {name: replace(held[raw], optional=False) for name, raw in adapter_names(tuned).items()}
        device = next((item.tensor.device for item in found.values()), torch.device("cpu"))
        for name, term in adapter_scalings(tuned).items():
            found[name] = Held(tensor=torch.tensor(term.scaling, device=device), shape=(), optional=False)
        return found

    def _sources(self, module: nn.Module, held: Mapping[str, Held]) -> list[Source]:
        return as_held(held)


def adapter_names(tuned: Tuned) -> dict[str, str]:
    """Name in a file of PEFT's -> name in the module, of everything that the active adapter brings.

    Raises `UnsupportedError` if several adapters are active, or none.
    """
    adapters = list(dict.fromkeys(term.adapter for terms in tuned.terms.values() for term in terms))
    if len(adapters) != 1:
        raise UnsupportedError(
            f"{len(adapters)} adapters are active ({first_five(adapters) or 'none'}); alone, without base weights, one "
            f"can be sent. lora='merged' sends the sum"
        )
    [adapter] = adapters
    found = {_in_file(tuned, raw, adapter): raw for raw in tuned.factors()}
    for raw, name in tuned.names.items():
        if f".modules_to_save.{adapter}." in f".{raw}":
            found[PREFIX + name] = raw
    return found


def adapter_scalings(tuned: Tuned) -> dict[str, Term]:
    """Name of each layer's scaling -> a term that has it."""
    terms = [term for terms in tuned.terms.values() for term in terms]
    return {PREFIX + layer_prefix(term).removeprefix(tuned.root) + SCALING: term for term in terms}


def layer_prefix(term: Term) -> str:
    """What the names of a layer's factors begin with in the module."""
    return term.b[: term.b.rindex("lora_")]


def _in_file(tuned: Tuned, raw: str, adapter: str) -> str:
    name = PREFIX + raw.removeprefix(tuned.root)
    name = name.replace(f".lora_magnitude_vector.{adapter}.weight", ".lora_magnitude_vector")
    head, mark, tail = name.rpartition(".lora_")
    kind, _, rest = tail.partition(f".{adapter}")
    return f"{head}{mark}{kind}{rest}" if mark else name


def layer_of(name: str) -> str:
    """The layer that a tensor of a file belongs to, with the file's prefix: factors, scaling, bias, a module's copy."""
    head, mark, _ = name.rpartition(".lora_")
    return head if mark else name.rpartition(".")[0]
