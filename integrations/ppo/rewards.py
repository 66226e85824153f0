"""Rewards: what they are computed by, and how several become one."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

from integrations.ppo.errors import ConflictError
from integrations.ppo.experience import Rollout

RuleFunction = Callable[[Rollout], float]


def imported(path: str) -> Any:
    """What "module:name" means. Raises `ConflictError` if there is no such thing."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConflictError(f"{path!r} is no module:function that can be imported: {error}") from error


def total(rewards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of several rewards, each `[batch]`."""
    return torch.stack(list(rewards)).sum(0)


class RewardComputationEngine:
    """Asks every source, one after the other, and aggregates."""

    def __init__(
        self, rules: Sequence[RuleFunction], reward_fn: Callable[[Sequence[torch.Tensor]], torch.Tensor] = total
    ) -> None:
        self._rules, self._reward_fn = rules, reward_fn

    def __call__(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """One reward for each, float32 `[batch]`."""
        each = [torch.tensor([rule(one) for one in rollouts], dtype=torch.float32) for rule in self._rules]
        reward = self._reward_fn(each)
        if reward.shape != (len(rollouts),):
            raise ValueError(f"reward_fn gave {list(reward.shape)} for {len(rollouts)} answers; one each is wanted")
        return reward.float()
