"""Producer for modules whose parameters stay the same objects, so that most of them need not be looked at closely."""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import nn

from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.glance import Glance, Watch
from wsync.targets import Targets
from wsync.traits import any_bits


class WatchingProducer(ShardedProducer):
    """Looks closely at each parameter only when anything has changed: that takes longer than a GPU needs to copy it.

    So `open` takes those that it saw last, if all of them still lie where they did, and `confirm` glances at the module
    to see that it still consists of them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._watch = Watch(self._memory)
        self._glanced: Sequence[Hashable] = ()
        self._numbers: dict[str, int] = {}
        self._unconfirmed = False

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
        self._settle_again()
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
        ids = {name: id(self._memory(held[name].tensor)) for name in found}
        known = all(here in numbers for here in ids.values()) and not any_bits(glance.tensors)
        self._numbers = {name: numbers[here] for name, here in ids.items()} if known else {}
        self._glanced = glance.key
        return found

    def _is_known(self, glance: Glance) -> bool:
        return glance.key == self._glanced and not any_bits(glance.tensors)

    def _named(self, tensors: Sequence[torch.Tensor]) -> Targets:
        return Targets(self._numbers, tensors, key=self._glanced)

    def _settle_again(self) -> None:
        """`_settle` of a module that has the modules that it had then: if it has others, `confirm` says so."""
        self._settle(self._alive())

    @staticmethod
    def _memory(tensor: torch.Tensor) -> torch.Tensor:
        """What of `tensor` lies in this process, as the very object that holds it."""
        return tensor
