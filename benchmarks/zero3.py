"""What each trainer rank runs to compare wsync with DeepSpeed's own gathers. Times go back to the test."""

import os
from collections.abc import Sequence
from importlib import import_module

import torch

from benchmarks.baselines.zero3_gather_loop import gather_all, gather_each
from benchmarks.gather import compare
from benchmarks.measure import Way
from benchmarks.models import Equal
from wsync.testing.ranks import Rank

EACH = "GatheredParameters loop"
AT_ONCE = "GatheredParameters at once"


def take(
    me: Rank, count: int, nbytes: int, senders: Sequence[int], rounds: int
) -> tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]]:
    """`benchmarks.gather.compare` with both of DeepSpeed's ways.

    Args:
        me: this rank.
        count: of bf16 parameters under ZeRO-3, moved as they are.
        nbytes: of each.
        senders: ranks that own an engine and so want everything in a slot of theirs.
        rounds: samples of each way.
    """
    os.environ.update(LOCAL_RANK=str(me.rank), DS_ACCELERATOR="cpu")
    deepspeed = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo needs no extension to be compiled
    actor = Equal(count, 2 * nbytes).bfloat16()
    deepspeed.zero.Init(module=actor)
    parameters = list(actor.parameters())
    loops: dict[str, Way] = {
        EACH: lambda: gather_each(parameters, torch.bfloat16),
        AT_ONCE: lambda: gather_all(parameters, torch.bfloat16),
    }
    model = Equal(count, 2 * nbytes).bfloat16() if me.rank in senders else None
    return compare(me, actor, loops, model, senders, rounds)
