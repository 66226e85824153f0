"""Entry point: `torchrun --nproc_per_node 2 -m integrations.ppo.train --fsdp --engine_type hf`."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from integrations.ppo import models
from integrations.ppo.arguments import Arguments, parse
from integrations.ppo.experience_maker import ExperienceMaker
from integrations.ppo.kl import kl_controller
from integrations.ppo.monitor import Monitor
from integrations.ppo.prompts import TOY_EVAL_PROMPTS, TOY_PROMPTS, PromptDataset, PromptStream, from_jsonl, from_toy
from integrations.ppo.rewards import rewards
from integrations.ppo.strategy import get_strategy
from integrations.ppo.strategy.base import Strategy
from integrations.ppo.trainer import Trainer, get_trainer_cls


def build(args: Arguments, folder: Path) -> Trainer:
    """*Collective.* A trainer with all its parts.

    Without `--pretrain` the engine starts from `folder`, which all ranks see.
    """
    trainer_cls = get_trainer_cls(args.trainer)
    strategy = get_strategy(args)
    policy = models.policy(args)
    models.check(args, strategy.tokenizer, policy.config)
    if not args.pretrain and strategy.is_rank_0:
        policy.save_pretrained(folder)
    actor = strategy.prepare("actor", models.adapted(args, models.parallel(args, policy)), args.actor_learning_rate)
    if args.has_critic:
        strategy.prepare("critic", models.parallel(args, models.critic(args)), args.critic_learning_rate)
    if args.has_reference:
        strategy.freeze("reference", models.parallel(args, models.policy(args)))
    judges = rewards(args, strategy)
    dist.barrier()
    strategy.setup_inference_engine(args, args.engine_type, actor.model, Path(args.pretrain or folder))
    kl = kl_controller(args.init_kl_coef, args.kl_target, args.kl_horizon)
    training, evaluation = data(args)
    share = args.rollout_batch_size // strategy.world_size
    return trainer_cls(
        args,
        strategy,
        maker=ExperienceMaker(args, strategy, strategy.tokenizer, judges, kl),
        prompts=PromptStream(strategy.setup_dataloader(training, share, shuffle=True)),
        evaluation=evaluation,
        kl=kl,
        monitor=Monitor(args.log_dir, args.steps, active=strategy.is_rank_0),
    )


def data(args: Arguments) -> tuple[PromptDataset, PromptDataset]:
    """(for training, for evaluation)."""
    training = (
        from_jsonl(args.prompt_data, args.input_key, args.label_key)
        if args.prompt_data
        else from_toy(TOY_PROMPTS, args.seed)
    )
    evaluation = (
        from_jsonl(args.eval_data, args.input_key, args.label_key)
        if args.eval_data
        else from_toy(TOY_EVAL_PROMPTS, args.seed + 1)
    )
    return training, evaluation


def run(argv: list[str]) -> None:
    """Train by a command line, within torchrun. Raises what went wrong, on the ranks where it did."""
    args = parse(argv)
    join(args.timeout_s)
    with shared_folder() as folder:
        trainer = build(args, folder)
        trainer.fit()
        close(trainer.strategy)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """*Collective.* A new folder of rank 0's, for the time of a block."""
    with tempfile.TemporaryDirectory(prefix="wsync-ppo-") as mine:
        names = [mine]
        dist.broadcast_object_list(names, 0)
        yield Path(names[0])
        dist.barrier()


def join(timeout_s: float) -> None:
    """Make the default process group from what torchrun left in the environment."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def close(strategy: Strategy) -> None:
    """End the engine."""
    if strategy.inference_engine is not None:
        strategy.inference_engine.close()


def main() -> None:
    """Run, and leave without the interpreter's own clean-up, in which a rank that used gloo may abort."""
    run(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
