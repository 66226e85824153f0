"""The optimizer and the scheduler of every model that trains."""

from typing import Any

import torch
from torch import nn

from integrations.ppo.arguments import Arguments
from integrations.ppo.strategy.master_weights import MasterAdamW


def adamw(args: Arguments, model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """Over what trains of `model`, which is bfloat16 with `--use_mp_opt`."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = MasterAdamW if args.use_mp_opt else torch.optim.AdamW
    return kind(trained, lr=learning_rate, weight_decay=args.weight_decay)


def scheduler(args: Arguments, optimizer: torch.optim.Optimizer) -> Any:
    """transformers' scheduler of that name, over all optimizer steps of the run."""
    from transformers import get_scheduler

    sequences = args.rollout_batch_size * args.n_samples_per_prompt
    steps = args.steps * args.max_epochs * (sequences // args.train_batch_size)
    return get_scheduler(args.lr_scheduler, optimizer, num_warmup_steps=args.lr_warmup_steps, num_training_steps=steps)
