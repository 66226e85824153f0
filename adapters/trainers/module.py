"""Producer for a module whose parameters lie whole in every process: plain, DDP, compiled, checkpoint-wrapped."""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.glance import Glance, Watch
from wsync.targets import Targets
from wsync.traits import any_bits


class ModuleProducer(ShardedProducer):
    """Exports a module as it is. Contiguous parameters are handed over in place, others are copied by `fill`.

    A close look at each parameter takes longer than a GPU needs to copy it. So `open` takes those that it saw last, if
    all of them still lie where they did, and `confirm` glances at the module to see that it still consists of them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._watch = Watch()
        self._glanced: Sequence[Hashable] = ()
        self._numbers: dict[str, int] = {}
        self._unconfirmed = False

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is a module that no framework has sharded."""
        if not isinstance(obj, nn.Module):
            return False
        if any(isinstance(module, FullyShardedDataParallel) for module in obj.modules()):
            return False
        # DeepSpeed marks the parameters that it has partitioned
        return not any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in obj.parameters())

    def confirm(self) -> bool:
        """See `wsync.Producer`."""
        if self._unconfirmed:
            self._unconfirmed = False
            if not self._is_known(self._watch.look(self._alive())):
                self._numbers = {}
                return False
        return True

    def _look_quickly(self) -> Mapping[str, torch.Tensor] | None:
        module = self._alive()
        if not self._numbers:
            return None
        recalled = None if self._unconfirmed else self._watch.recall()  # nobody confirmed it: look now
        self._unconfirmed = recalled is not None
        if recalled is not None:
            return self._named(recalled)
        glance = self._watch.look(module)
        return self._named(glance.tensors) if self._is_known(glance) else None

    def _look_closely(self) -> dict[str, torch.Tensor]:
        self._numbers = {}  # of what was seen before; this may raise
        found, module = super()._look_closely(), self._alive()
        glance, held = self._watch.look(module), self._held(module)
        numbers = {id(tensor): number for number, tensor in enumerate(glance.tensors)}
        known = all(id(held[name].tensor) in numbers for name in found) and not any_bits(glance.tensors)
        self._numbers = {name: numbers[id(held[name].tensor)] for name in found} if known else {}
        self._glanced = glance.key
        return found

    def _is_known(self, glance: Glance) -> bool:
        return glance.key == self._glanced and not any_bits(glance.tensors)

    def _named(self, tensors: Sequence[torch.Tensor]) -> Targets:
        return Targets(self._numbers, tensors, key=self._glanced)
