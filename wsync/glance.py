"""A cheap look at a module: enough to tell that nothing about it has changed since the last, close one."""

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import is_, is_not, itemgetter
from typing import Any

import torch
from torch import nn

from wsync.traits import addresses, device_numbers, traits
from wsync.walk import named_modules, named_tensors

_PARAMETERS, _BUFFERS, _MODULES = itemgetter("_parameters"), itemgetter("_buffers"), itemgetter("_modules")

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Glance:
    """What a module consists of."""

    key: Sequence[Hashable]
    """Equal to that of another glance only if both saw the same modules, names and tensors, in the same places."""

    tensors: Sequence[torch.Tensor]
    """Parameters and buffers, or what has their memory, in the same order for equal keys. A tied one comes as often as
    it is held."""


class Watch:
    """Glances at one module, time after time. Holds neither module nor tensors between them."""

    def __init__(self, memory: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """`memory`: gives for a parameter the tensor whose memory it has. None: it is that itself."""
        self._memory = memory
        self._tree = _Tree([])
        self._tensors: Sequence[weakref.ref[torch.Tensor]] = ()
        self._addresses: Sequence[int] = ()

    def recall(self) -> list[torch.Tensor] | None:
        """The tensors that were seen last, if all of them are still where they were; None if not.

        Takes a tenth of a look, and does not tell whether the module still holds them.
        """
        tensors = [tensor for ref in self._tensors if (tensor := ref()) is not None]
        with torch._C.DisableTorchFunctionSubclass():
            return tensors if tensors and addresses(tensors) == self._addresses else None

    def look(self, module: nn.Module) -> Glance:
        """Look at `module`. Takes about a third of a microsecond for each module and each tensor in it.

        What cannot be told at a glance (scripted modules, tensors without an address) gives a key that equals no other.
        """
        try:
            tensors = self._tree.tensors(module)
            if tensors is None:
                self._tree = _Tree([here for _, here in named_modules(module)])
                tensors = self._tree.tensors(module) or []
            if self._memory is not None:
                tensors = list(map(self._memory, tensors))
            if len(tensors) != len(self._tensors) or any(map(is_not, tensors, (ref() for ref in self._tensors))):
                self._tensors = list(map(weakref.ref, tensors))
            with torch._C.DisableTorchFunctionSubclass():  # a parameter's own class would be asked for each of these
                self._addresses, devices, looks = addresses(tensors), device_numbers(tensors), traits(tensors)
        except (KeyError, RuntimeError, TypeError):
            self._tensors = ()
            return Glance([object()], [tensor for _, tensor, _ in named_tensors(module)])
        return Glance([self._tree.number, *self._addresses, *devices, *chain.from_iterable(looks)], tensors)


class _Tree:
    """Modules and what hangs on what, as it was when this was made. Every step is one call for all modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.number = next(_numbers)
        self._modules = [weakref.ref(module) for module in modules]
        groups = _groups(modules)
        self._sizes = list(map(len, groups))
        self._names, values = _content(groups, self._sizes)
        self._ids = list(map(id, values))
        self._are_tensors = [isinstance(value, torch.Tensor) for value in values]

    def tensors(self, root: nn.Module) -> list[torch.Tensor] | None:
        """Parameters and buffers; None if anything in `root` is not what it was."""
        modules = [module() for module in self._modules]
        if not modules or modules[0] is not root or any(map(is_, modules, repeat(None))):
            return None
        groups = _groups(modules)
        if list(map(len, groups)) != self._sizes:
            return None
        names, values = _content(groups, self._sizes)
        if list(map(id, values)) != self._ids or names != self._names:
            return None
        return list(compress(values, self._are_tensors))


def _groups(modules: Iterable[nn.Module | None]) -> list[dict[str, Any]]:
    """What each module holds. Not by attribute: that would be looked for in all base classes first."""
    spaces = list(map(vars, modules))
    return [*map(_PARAMETERS, spaces), *map(_BUFFERS, spaces), *map(_MODULES, spaces)]


def _content(groups: Sequence[dict[str, Any]], sizes: Sequence[int]) -> tuple[list[str], list[Any]]:
    full = list(compress(groups, sizes))
    return list(chain.from_iterable(full)), list(chain.from_iterable(map(dict.values, full)))
