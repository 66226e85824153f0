"""What the session does with a producer, step by step, for tests that run it on real ranks."""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from wsync.adapters.trainers.fsdp import FSDPProducer
from wsync.adapters.trainers.module import ModuleProducer
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.digest import word_bytes
from wsync.group import Group
from wsync.handshake import merge_specs
from wsync.plan import Plan, TensorSpec, as_bytes
from wsync.testing.ranks import Rank

GROUP_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to try on every rank."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of it on one rank: a result, or a traceback."""

    result: Any = None
    error: str = ""


def run_cases(me: Rank, cases: Sequence[Case]) -> dict[str, Outcome]:
    """All cases one after the other in the same processes: importing torch takes longer than most of them."""
    found = {}
    for case in cases:
        try:
            found[case.name] = Outcome(result=case.run(me, *case.args))
        except Exception:
            found[case.name] = Outcome(error=traceback.format_exc())
    return found


def producer_for(model: nn.Module) -> ShardedProducer:
    [kind] = [kind for kind in (FSDPProducer, ModuleProducer) if kind.matches(model)]
    return kind(model)


def make_group(me: Rank, name: str) -> Group:
    return Group(me.rank, me.world_size, PrefixStore(name, me.store), GROUP_TIMEOUT_S)


def plan_of(producer: ShardedProducer, dtype: torch.dtype, limit: int) -> Plan:
    """The plan from every rank's metadata, exchanged here on the default group."""
    by_rank: list[Sequence[TensorSpec]] = [()] * dist.get_world_size()
    dist.all_gather_object(by_rank, list(producer.metadata()))
    specs = [
        TensorSpec(name=spec.name, shape=spec.shape, dtype=dtype, owners=spec.owners)
        for spec in merge_specs(by_rank)
        if not spec.optional
    ]
    return Plan.pack([replace(spec, word_bytes=word_bytes(spec)) for spec in specs], limit)


def sync(producer: ShardedProducer, plan: Plan, senders: Sequence[int], rank: int) -> dict[str, torch.Tensor]:
    """Open, fill every bucket, close. A sender's tensors put together from its slots; nothing on other ranks."""
    flat = {spec.name: torch.full((spec.nbytes,), 0xA5, dtype=torch.uint8) for spec in plan.specs}
    producer.open()
    for bucket in plan.buckets:
        sends = rank in senders if bucket.sender is None else rank == bucket.sender
        slot = torch.full((bucket.nbytes,), 0x5A, dtype=torch.uint8) if sends else None
        producer.stage(bucket, slot)
        producer.fill(bucket, slot)
        if slot is not None:
            for meta in bucket.tensors:
                chunk = slot[meta.offset :][: meta.chunk_nbytes]
                flat[meta.name][meta.chunk_offset :][: meta.chunk_nbytes] = chunk
    producer.close()
    return {s.name: flat[s.name].view(s.dtype).view(s.shape) for s in plan.specs} if rank in senders else {}


def differing(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], dtype: torch.dtype) -> list[str]:
    """Names whose bytes are not those of the expected tensor after a cast to `dtype`."""
    missing = sorted(set(result) ^ set(expected))
    wrong = [
        name
        for name, tensor in expected.items()
        if name in result and not torch.equal(as_bytes(result[name]), as_bytes(tensor.to(dtype)))
    ]
    return missing + wrong
