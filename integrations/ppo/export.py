"""Trained weights as a transformers checkpoint."""

from pathlib import Path
from typing import Any

import torch

import wsync
from integrations.ppo import models
from integrations.ppo.arguments import Arguments
from integrations.ppo.strategy.base import Strategy


def export(args: Arguments, strategy: Strategy, tokenizer: Any, folder: Path) -> None:
    """*Collective.* Write the actor to `folder`, whoever shards it, LoRA merged.

    A transformers model of rank 0's is one more engine to sync into. It is where the actor's shards are: those on GPUs
    can only be read by GPUs.
    """
    strategy.enter("score")
    place = torch.device("cpu") if args.fsdp_cpu_offload else strategy.device
    target = models.policy(args).eval().to(place) if strategy.is_rank_0 else None
    wsync.sync(strategy.roles["actor"].model, target)
    if target is not None:
        target.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
