"""Strategies by arguments."""

from integrations.ppo.arguments import Arguments
from integrations.ppo.errors import ConflictError
from integrations.ppo.strategy.base import Strategy
from integrations.ppo.strategy.fsdp2 import FSDPV2Strategy


def get_strategy(args: Arguments) -> Strategy:
    """`FSDPV2Strategy` with `--fsdp`. The default process group is there."""
    if not args.fsdp:
        raise ConflictError("there is no other way to shard than --fsdp yet")
    return FSDPV2Strategy(args)
