"""What tests of DeepSpeed and FSDP1 do with a trainer: syncs step by step, and whole ones into Hugging Face models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

import wsync
from tests.distributed.exchange_steps import differing, make_group, plan_of, sync
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.plan import as_bytes
from wsync.registry import producer_for
from wsync.testing.ranks import Rank

CONFIG = wsync.SyncConfig(bucket_bytes=4096, timeout_s=20.0)
PROMPT = torch.tensor([[3, 1, 4, 1, 5]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """An actor, and how its framework trains and gathers it."""

    actor: Any
    step: Callable[[Any, int], None]
    full: Callable[[Any], dict[str, torch.Tensor]]
    """*Collective.* Every checkpoint tensor."""

    dtype: torch.dtype = torch.float32

    def train(self, seed: int) -> None:
        """One optimizer step."""
        self.step(self.actor, seed)

    def tensors(self) -> dict[str, torch.Tensor]:
        """*Collective.* Every checkpoint tensor, now."""
        return self.full(self.actor)


def three_syncs(me: Rank, name: str, trainer: Trainer, alone: Trainer) -> None:
    """Before the first forward, then after training steps and a forward without gradients each.

    One sender and buckets that cut every large tensor; then all send and one bucket holds the whole model. `alone`
    trains alike and is never synced: both stay equal bit by bit.
    """
    group = make_group(me, name)
    everyone = list(range(me.world_size))
    seed = 0
    for senders, dtype, limit, syncs in (([0], torch.bfloat16, 4096, 3), (everyone, trainer.dtype, 1 << 20, 1)):
        producer = producer_for(trainer.actor)
        assert isinstance(producer, ShardedProducer)
        plan = plan_of(producer, dtype, limit)
        producer.prepare(plan, senders, group)
        for _ in range(syncs):
            result = sync(producer, plan, senders, me.rank)
            expected = trainer.tensors()
            if me.rank in senders:
                assert differing(result, expected, dtype) == [], (senders, seed)
            trainer.train(seed)
            alone.train(seed)
            seed += 1
    assert unequal(trainer.tensors(), alone.tensors()) == []
    group.close()


def unequal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that only one has, or whose bytes differ."""
    odd = sorted(one.keys() ^ other.keys())
    return odd + [n for n in one.keys() & other.keys() if not torch.equal(as_bytes(one[n]), as_bytes(other[n]))]


def into_hugging_face(me: Rank, trainer: Trainer, make: Callable[[], PreTrainedModel]) -> str:
    """Three syncs, one that fails at bucket 2 on rank 1, and the one that heals. The error on this rank."""
    engine = make().to(trainer.dtype) if me.rank == 0 else None
    for turn in range(3):
        trainer.train(turn)
        assert wsync.sync(trainer.actor, engine, config=CONFIG).version == turn + 1
        check_tokens(engine, trainer, make)
    words = fail_at_bucket_two(me, trainer, engine)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == me.world_size
    trainer.train(4)
    assert wsync.sync(trainer.actor, engine, config=CONFIG).version == 4
    check_tokens(engine, trainer, make)
    return words


def fail_at_bucket_two(me: Rank, trainer: Trainer, engine: PreTrainedModel | None) -> str:
    healthy = ShardedProducer.stage

    def stage(self: ShardedProducer, bucket: wsync.Bucket, slot: torch.Tensor | None) -> None:
        if me.rank == 1 and bucket.index == 2:
            raise MemoryError("no room to pack bucket 2")
        healthy(self, bucket, slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedProducer, "stage", stage)
        with pytest.raises((wsync.RankError, MemoryError)) as caught:
            wsync.sync(trainer.actor, engine, config=CONFIG)
    return f"{type(caught.value).__name__}: {caught.value}"


def check_tokens(engine: PreTrainedModel | None, trainer: Trainer, make: Callable[[], PreTrainedModel]) -> None:
    """*Collective.* The engine's weights and greedy tokens are those of a fresh model with the trainer's weights."""
    expected = trainer.tensors()
    if engine is None:
        return
    fresh = make().to(trainer.dtype)
    missing, unexpected = fresh.load_state_dict(expected, strict=False)
    assert not unexpected
    assert set(missing) <= set(fresh.all_tied_weights_keys)
    assert unequal(dict(fresh.named_parameters()), dict(engine.named_parameters())) == []
    assert greedy(engine) == greedy(fresh)


def greedy(model: PreTrainedModel) -> list[int]:
    tokens: torch.Tensor = model.generate(PROMPT, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(token) for token in tokens[0]]
