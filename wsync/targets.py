"""Live tensors of a model by name, of which hardly any are touched one by one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch


class Targets(Mapping[str, torch.Tensor]):
    """Tensors by name, each outside of autograd when it is asked for.

    Attributes:
        key: the same object for as long as nothing about the tensors has changed: not their places either.
        tensors: all of them as the model holds them, perhaps of a class of its own.
        inference: whether any was made in inference mode.
    """

    def __init__(
        self, numbers: Mapping[str, int], tensors: Sequence[torch.Tensor], *, key: object, inference: bool = False
    ) -> None:
        """`numbers`: name -> index of its tensor in `tensors`."""
        self.key, self.tensors, self.inference = key, tensors, inference
        self._numbers = numbers

    def __getitem__(self, name: str) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.tensors[self._numbers[name]].detach()

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def held(self, names: Iterable[str]) -> Sequence[torch.Tensor]:
        """The tensors of these names as the model holds them."""
        return list(map(self.tensors.__getitem__, map(self._numbers.__getitem__, names)))


def memories_of(targets: Mapping[str, torch.Tensor], names: Iterable[str]) -> Sequence[torch.Tensor]:
    """Tensors as they are held: under `DisableTorchFunctionSubclass` they are as good as those in `targets`."""
    return targets.held(names) if isinstance(targets, Targets) else list(map(targets.__getitem__, names))


def key_of(targets: Mapping[str, torch.Tensor]) -> object | None:
    """See `Targets.key`; None if nobody knows."""
    return targets.key if isinstance(targets, Targets) else None


def all_held(targets: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
    """All of them; each perhaps more than once."""
    return targets.tensors if isinstance(targets, Targets) else list(targets.values())
