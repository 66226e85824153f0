"""A fixed list of strided copies between memories that may move from one run to the next."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from wsync.strided import memory_view
from wsync.views import Place, as_dtype

if TYPE_CHECKING:
    from wsync.copy_kernel import Launches


Pair = tuple[Place, Place]
"""Source and target, of equal sizes: element i of the one goes to element i of the other, cast if dtypes differ."""


class Copies:
    """Copies that are worked out once and run at every sync.

    On a GPU they are one kernel for each pair of dtypes; where that cannot be (memories on several devices, dtypes that
    the kernel does not convert, runs of a few elements) torch copies views.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = tuple(pairs)
        self._launches: Launches | None = None
        self._device: torch.device | None = None

    def run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copy on the current stream of the device; on the CPU it is done when this returns.

        Args:
            sources, targets: the memories that `Place.memory` counts. They may lie elsewhere at every run.
        """
        if not self._pairs:
            return
        device = _only_device(sources, targets)
        if device is None or device.type != "cuda":
            copy_views(self._pairs, sources, targets)
            return
        if self._launches is None or self._device != device:
            from wsync.copy_kernel import Launches

            self._launches, self._device = Launches(self._pairs, device), device
        self._launches.run(sources, targets)


def copy_views(pairs: Sequence[Pair], sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """The same copies by torch, one call for each pair of dtypes."""
    typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    groups = defaultdict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]](
        lambda: ([], [])
    )
    for source, target in pairs:
        froms, tos = groups[source.dtype, target.dtype]
        froms.append(_view(source, sources[source.memory], typed))
        tos.append(_view(target, targets[target.memory], typed))
    for froms, tos in groups.values():
        torch._foreach_copy_(tos, froms)


def _view(place: Place, memory: torch.Tensor, typed: dict[tuple[int, torch.dtype], torch.Tensor]) -> torch.Tensor:
    key = (id(memory), place.dtype)
    if key not in typed:
        typed[key] = as_dtype(memory, place.dtype)
    return memory_view(typed[key], place.region)


def _only_device(*memories: Sequence[torch.Tensor]) -> torch.device | None:
    devices = {tensor.device for group in memories for tensor in group}
    return devices.pop() if len(devices) == 1 else None
