"""What this rank holds of a model, whoever shards it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def shards(model: Any) -> list[torch.Tensor]:
    """The part of every parameter that trains, in place: of FSDP2, of ZeRO-3, or whole. The model is on the device."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # a forward without gradients leaves it whole
            module.reshard()
    return [_local(one) for one in model.parameters() if one.requires_grad]


def _local(parameter: Any) -> torch.Tensor:
    part: torch.Tensor = getattr(parameter, "ds_tensor", parameter).detach()
    return part.to_local() if isinstance(part, DTensor) else part


class MovingAverage:
    """Exponential moving average of a model's weights: this rank's part of them, float32, in host memory."""

    def __init__(self, model: Any, decay: float) -> None:
        """`decay` is how much of the average stays at each `update`."""
        self._model, self._decay = model, decay
        self._average = [shard.float().cpu().clone() for shard in shards(model)]

    def update(self) -> None:
        """Take in the present weights."""
        for average, shard in zip(self._average, shards(self._model), strict=True):
            average.lerp_(shard.float().cpu(), 1 - self._decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the model have the average for a block."""
        held = shards(self._model)
        kept = [shard.clone() for shard in held]
        try:
            for shard, average in zip(held, self._average, strict=True):
                shard.copy_(average)
            yield
        finally:
            for shard, was in zip(shards(self._model), kept, strict=True):
                shard.copy_(was)

    def state_dict(self) -> dict[str, Any]:
        """The average."""
        return {"average": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The other way round."""
        self._average = state["average"]
