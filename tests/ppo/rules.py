"""Rewards for tests."""

import random
from collections.abc import Sequence

import numpy as np
import torch

from integrations.ppo.experience import Rollout


def prompt_length(rollout: Rollout) -> float:
    """Known without a model."""
    return float(len(rollout.prompt))


def labelled(rollout: Rollout) -> float:
    """Whether the label is the prompt."""
    return float(rollout.label == rollout.prompt)


def drawing(rollout: Rollout) -> float:
    """Nothing, at the cost of every random state."""
    return 0.0 * (random.random() + np.random.rand() + torch.rand(()).item())


def last(rewards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of several rewards."""
    return rewards[-1]
