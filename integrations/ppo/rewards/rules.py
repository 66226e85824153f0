"""Rewards by functions of one's own."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from integrations.ppo.errors import ConflictError
from integrations.ppo.experience import Rollout


class RuleReward:
    """A function of one rollout. See `RewardSource`."""

    def __init__(self, function: Callable[[Rollout], float]) -> None:
        self._function = function

    def __call__(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """See `RewardSource`."""
        return torch.tensor([self._function(one) for one in rollouts], dtype=torch.float32)


def imported(path: str) -> Any:
    """What "module:name" means. Raises `ConflictError` if there is no such thing."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConflictError(f"{path!r} is no module:function that can be imported: {error}") from error
