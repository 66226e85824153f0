"""Rewards for tests."""

from integrations.ppo.experience import Rollout


def prompt_length(rollout: Rollout) -> float:
    """Known without a model."""
    return float(len(rollout.prompt))
