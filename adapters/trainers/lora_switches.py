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
        self._layers = [weakref.ref(layer) for layer in (*layers, unwrap(module))]

    def positions(self) -> Sequence[Hashable]:
        """Equal to what was seen before only if nothing has been switched, scaled, or dropped since."""
        return [object() if (layer := ref()) is None else _position(layer) for ref in self._layers]


def _position(layer: Any) -> Hashable:
    found = vars(layer)
    variants = {adapter: type(variant) for adapter, variant in found.get("lora_variant", {}).items()}
    scales = (tuple(settings.items()) for settings in (found.get("scaling", {}), found.get("lora_bias", {}), variants))
    active = getattr(layer, "active_adapters", ())
    return tuple(active), getattr(layer, "disable_adapters", False), tuple(found.get("merged_adapters", ())), *scales
