"""Rewards by what `--reward` says: a URL, a folder, or module:function."""

from pathlib import Path

from integrations.ppo.arguments import Arguments, is_url
from integrations.ppo.rewards.engine import RewardComputationEngine, RewardSource, total
from integrations.ppo.rewards.model import ModelReward
from integrations.ppo.rewards.remote import RemoteReward
from integrations.ppo.rewards.rules import RuleReward, imported
from integrations.ppo.strategy.base import Strategy

__all__ = ["RewardComputationEngine", "rewards", "total"]


def rewards(args: Arguments, strategy: Strategy) -> RewardComputationEngine:
    """*Collective.* All of them. Raises `ConflictError` for what is none of the three."""
    sources = [_source(args, strategy, path, number) for number, path in enumerate(args.reward)]
    return RewardComputationEngine(sources, imported(args.reward_fn))


def _source(args: Arguments, strategy: Strategy, path: str, number: int) -> RewardSource:
    if is_url(path):
        return RemoteReward(path, timeout_s=args.remote_reward_timeout_s, retries=args.remote_reward_retries)
    if Path(path).is_dir():
        return ModelReward(strategy, path, f"reward {number}", args.micro_rollout_batch_size)
    return RuleReward(imported(path))
