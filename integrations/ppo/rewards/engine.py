"""All rewards of an answer, made one."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from integrations.ppo.experience import Rollout


class RewardSource(Protocol):
    """Something that judges answers. May be collective: every rank calls it, with any number of rollouts."""

    def __call__(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """One reward for each, `[batch]`."""
        ...


def total(rewards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of several rewards, each `[batch]`."""
    return torch.stack(list(rewards)).sum(0)


class RewardComputationEngine:
    """Asks every source, one after the other, and aggregates."""

    def __init__(
        self, sources: Sequence[RewardSource], reward_fn: Callable[[Sequence[torch.Tensor]], torch.Tensor] = total
    ) -> None:
        self._sources, self._reward_fn = sources, reward_fn

    def __call__(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """*Collective.* One reward for each, float32 `[batch]`. Raises `ValueError` for another shape."""
        reward = self._reward_fn([source(rollouts).float() for source in self._sources])
        if reward.shape != (len(rollouts),):
            raise ValueError(f"reward_fn gave {list(reward.shape)} for {len(rollouts)} answers; one each is wanted")
        return reward
