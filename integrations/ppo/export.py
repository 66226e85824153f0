"""Trained weights as a transformers checkpoint."""

from pathlib import Path
from typing import Any

import wsync
from integrations.ppo import models
from integrations.ppo.arguments import Arguments
from integrations.ppo.strategy.base import Strategy


def export(args: Arguments, strategy: Strategy, tokenizer: Any, folder: Path) -> None:
    """*Collective.* Write the actor to `folder`, whoever shards it, LoRA merged.

    A transformers model in rank 0's host memory is one more engine to sync into.
    """
    strategy.enter("score")
    target = models.policy(args).eval() if strategy.is_rank_0 else None
    wsync.sync(strategy.roles["actor"].model, target)
    if target is not None:
        target.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
