"""What each trainer rank runs to compare wsync with the per-parameter loops. Times go back to the test."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import wsync
from benchmarks.baselines.full_tensor_loops import cast_then_gather, gather_then_cast
from benchmarks.measure import Way
from benchmarks.models import Equal
from wsync.adapters.engines.hf import HFEngine
from wsync.deadline import Deadline
from wsync.group import Group
from wsync.plan import Plan, TensorSpec
from wsync.registry import producer_for
from wsync.testing.ranks import Rank

TIMEOUT_S = 300.0
FULL_TENSOR = "full_tensor loop"
CAST_FIRST = "cast-first loop"
GATHER = "gather"
SYNC = "sync"


def take(
    me: Rank, count: int, nbytes: int, senders: Sequence[int], rounds: int
) -> tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]]:
    """`compare` wsync with both loops over FSDP2.

    Args:
        me: this rank.
        count: of fp32 parameters under FSDP2, all moved in bf16.
        nbytes: of each in fp32.
        senders: ranks that own an engine and so want everything in a slot of theirs.
        rounds: samples of each way.
    """
    actor = Equal(count, nbytes)
    fully_shard(actor)
    parameters = [parameter for parameter in actor.parameters() if isinstance(parameter, DTensor)]
    loops: dict[str, Way] = {
        FULL_TENSOR: lambda: gather_then_cast(parameters, torch.bfloat16),
        CAST_FIRST: lambda: cast_then_gather(parameters, torch.bfloat16),
    }
    model = Equal(count, nbytes).bfloat16() if me.rank in senders else None
    return compare(me, actor, loops, model, senders, rounds)


def compare(
    me: Rank,
    actor: nn.Module,
    loops: Mapping[str, Way],
    model: nn.Module | None,
    senders: Sequence[int],
    rounds: int,
) -> tuple[dict[str, tuple[float, ...]], dict[str, tuple[float, ...]]]:
    """Seconds on this rank: of the loops, `rounds` + 1 times, and of wsync's ways, `rounds` times in between.

    Args:
        me: this rank.
        actor: what is trained; everything travels in bf16.
        loops: what trainers do today.
        model: the engine's, in bf16, if this rank is a sender.
        senders: ranks that want everything in a slot of theirs.
        rounds: samples of each way.
    """
    with _whole_sync(actor, model) as sync:
        ways = {GATHER: _gather(me, actor, senders), SYNC: sync}
        for way in (*loops.values(), *ways.values()):
            _seconds(way)
        before = [{name: _seconds(way) for name, way in loops.items()}]
        own = []
        for _ in range(rounds):
            own.append({name: _seconds(way) for name, way in ways.items()})
            before.append({name: _seconds(way) for name, way in loops.items()})
    return (
        {name: tuple(taken[name] for taken in before) for name in loops},
        {name: tuple(taken[name] for taken in own) for name in ways},
    )


def _seconds(way: Way) -> float:
    """Until every rank is done."""
    dist.barrier()
    start = time.perf_counter()
    way()
    dist.barrier()
    return time.perf_counter() - start


@contextmanager
def _whole_sync(actor: nn.Module, model: nn.Module | None) -> Iterator[Way]:
    """Everything that a user waits for, into an engine in the process of each sender."""
    with wsync.connect(actor, HFEngine(model) if model is not None else None) as session:
        yield session.sync


def _gather(me: Rank, actor: nn.Module, senders: Sequence[int]) -> Way:
    """Shards into the slots of the senders, with the go/stop before each bucket: what the loops do, and no engine."""
    producer = producer_for(actor)
    specs: list[Sequence[TensorSpec]] = [()] * me.world_size
    dist.all_gather_object(specs, list(producer.metadata()))
    plan = Plan.pack(
        [
            TensorSpec(
                name=same[0].name,
                shape=same[0].shape,
                dtype=torch.bfloat16,
                owners=tuple(owner for spec in same for owner in spec.owners),
            )
            for same in zip(*specs, strict=True)
        ],
        wsync.SyncConfig().bucket_bytes,
    )
    group = Group(me.rank, me.world_size, PrefixStore("gather", me.store), TIMEOUT_S)
    producer.prepare(plan, senders, group)
    slots = [torch.ones(plan.capacity, dtype=torch.uint8) for _ in range(2)] if me.rank in senders else []

    def gather() -> None:
        producer.open()
        for bucket in plan.buckets:
            producer.stage(bucket, slots[bucket.index % 2] if slots else None)
            group.agree("bucket", None, Deadline.after(TIMEOUT_S))
            producer.fill(bucket, slots[bucket.index % 2] if slots else None)
        producer.close()

    return gather
