"""Strategies by arguments."""

from integrations.ppo.arguments import Arguments
from integrations.ppo.strategy.base import Strategy


def get_strategy(args: Arguments) -> Strategy:
    """`FSDPV2Strategy` with `--fsdp`, else `DeepspeedStrategy`. The default process group is there."""
    if args.fsdp:
        from integrations.ppo.strategy.fsdp2 import FSDPV2Strategy

        return FSDPV2Strategy(args)
    from integrations.ppo.strategy.deepspeed import DeepspeedStrategy

    return DeepspeedStrategy(args)
