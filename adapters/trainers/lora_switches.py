"""What PEFT's layers have as attributes, and no glance at tensors shows: adapters active, disabled, merged."""

import sys
import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from wsync.adapters.trainers.names import unwrap
from wsync.adapters.trainers.sharded import ShardedProducer


class SwitchedProducer(ShardedProducer):
    """Looks closely at a module under PEFT whenever an adapter was switched or scaled since the last close look."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._switches: Switches | None = None
        self._positions: Sequence[Hashable] = ()

    def _look_quickly(self) -> Mapping[str, torch.Tensor] | None:
        if self._switches is None or self._switches.positions() != self._positions:
            return None
        return super()._look_quickly()

    def _look_closely(self) -> dict[str, torch.Tensor]:
        self._switches = None  # of what was seen before; this may raise
        found = super()._look_closely()
        self._switches = Switches(self._alive())
        self._positions = self._switches.positions()
        return found


class Switches:
    """Those of all layers of PEFT that a module has now, which are held weakly."""

    def __init__(self, module: nn.Module) -> None:
        peft = sys.modules["peft"]
        kinds = {peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper}
        layers = [child for child in module.modules() if not kinds.isdisjoint(type(child).__mro__)]
        outer = unwrap(module)
        models = [outer] if isinstance(outer, peft.PeftModel) else []  # any other has methods of these names
        self._switches = [
            *((weakref.ref(model), _active) for model in models),
            *((weakref.ref(layer), _position) for layer in layers),
        ]

    def positions(self) -> Sequence[Hashable]:
        """Equal to what was seen before only if nothing has been switched, scaled, or dropped since."""
        return [object() if (module := ref()) is None else look(module) for ref, look in self._switches]


def _active(module: Any) -> Hashable:
    return tuple(module.active_adapters)


def _position(layer: Any) -> Hashable:
    found = vars(layer)
    variants = {adapter: type(variant) for adapter, variant in found.get("lora_variant", {}).items()}
    scales = (tuple(settings.items()) for settings in (found.get("scaling", {}), found.get("lora_bias", {}), variants))
    return _active(layer), bool(layer.disable_adapters), tuple(found.get("merged_adapters", ())), *scales
