"""A fixed list of strided copies between memories that may move from one run to the next."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from wsync.strided import memory_view
from wsync.traits import all_on_cpu
from wsync.views import Pair, Place, as_dtype
from wsync.whole_copies import WholeCopies, split_whole

if TYPE_CHECKING:
    from wsync.copy_kernel import Launches

Keys = tuple[object | None, object | None]
"""Of sources and targets: each the same object for as long as all of them lie where they lay, None if nobody knows."""

UNKNOWN: Keys = (None, None)


class Copies:
    """Copies that are worked out once and run at every sync.

    On a GPU they are one kernel for each pair of dtypes, on the CPU those of whole tensors need few views. All else is
    left to torch, a view for each side: memories on several devices, dtypes that the kernel does not convert.
    """

    def __init__(self, pairs: Sequence[Pair], *, device: torch.device | None = None, over_link: bool = False) -> None:
        """Args:
        pairs: what is copied.
        device: that copies, of the targets, which can read whatever `pairs` name. None: that of all memories, if it is
            only one.
        over_link: whether sources lie on other devices: such copies leave most of `device` to others.
        """
        self._pairs, self._fixed, self._over_link = tuple(pairs), device, over_link
        self._launches: Launches | None = None
        self._device: torch.device | None = None
        self._host: tuple[Sequence[WholeCopies], Sequence[Pair]] | None = None

    def run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], keys: Keys = UNKNOWN) -> None:
        """Copy on the current stream of the device; on the CPU it is done when this returns.

        Args:
            sources, targets: the memories that `Place.memory` counts. They may lie elsewhere at every run.
            keys: those of the last run spare a look at every address.
        """
        if not self._pairs:
            return
        with torch._C.DisableTorchFunctionSubclass():  # a parameter's own class would be asked at every step
            self._run(sources, targets, keys)

    def _run(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], keys: Keys) -> None:
        if self._launches is not None and self._launches.again(sources, targets, keys):
            return
        if all_on_cpu(sources) and all_on_cpu(targets):
            if self._host is None:
                self._host = split_whole(self._pairs)
            wholes, others = self._host
            missed = [pair for whole in wholes if not whole.run(sources, targets) for pair in whole.pairs]
            copy_views([*others, *missed], sources, targets)
            return
        device = self._fixed or _only_device(sources, targets)
        if device is None or device.type != "cuda":
            copy_views(self._pairs, sources, targets)
        else:
            self._on_device(device).run(sources, targets, keys)

    def _on_device(self, device: torch.device) -> "Launches":
        if self._launches is None or self._device != device:
            from wsync.copy_kernel import Launches

            self._launches, self._device = Launches(self._pairs, device, sparing=self._over_link), device
        return self._launches


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
