"""Rewards for tests."""

from integrations.ppo.experience import Rollout


def prompt_length(rollout: Rollout) -> float:
    """Known without a model."""
    return float(len(rollout.prompt))


def labelled(rollout: Rollout) -> float:
    """Whether the label is the prompt."""
    return float(rollout.label == rollout.prompt)
