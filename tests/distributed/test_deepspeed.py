"""DeepSpeed engines of every ZeRO stage on 2 and 3 real ranks: what is exported, and that training does not notice.

One set of ranks goes through all kinds of its size; each kind is then a test of its own.
"""

import pytest
import torch

from tests.distributed.deepspeed_engines import KINDS, full_tensors, start, train_step
from tests.distributed.exchange_steps import Case, Outcome, differing, make_group, plan_of, run_cases, sync
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.registry import producer_for
from wsync.testing.ranks import Rank, run_ranks

ON_THREE = ["zero3", "zero3 moe", "zero3 bf16"]


def three_syncs(me: Rank, name: str) -> None:
    """Before the first forward, then each after a training step and a forward without gradients.

    One sender, then all; a bucket that cuts every large tensor, and one that holds the whole model. A second engine
    trains alike and is never synced: both stay equal bit by bit.
    """
    kind = KINDS[name]
    engine = start(me, kind)
    alone = start(me, kind) if "hpz" not in name else engine  # DeepSpeed has its groups once a process
    group = make_group(me, name)
    everyone = list(range(me.world_size))
    for senders, dtype, limit in (([0], torch.bfloat16, 4096), (everyone, kind.dtype, 1 << 20)):
        producer = producer_for(engine if senders == [0] else engine.module)
        assert isinstance(producer, ShardedProducer)
        plan = plan_of(producer, dtype, limit)
        producer.prepare(plan, senders, group)
        for step in range(3):
            result = sync(producer, plan, senders, me.rank)
            expected = full_tensors(engine)
            if me.rank in senders:
                assert {tensor.dtype for tensor in expected.values()} == {kind.dtype}
                assert differing(result, expected, dtype) == [], (senders, step)
            train_step(engine, step)
            if alone is not engine:
                train_step(alone, step)
    assert differing(full_tensors(engine), full_tensors(alone), kind.dtype) == []
    group.close()


def outcomes(names: list[str], world_size: int) -> dict[str, list[Outcome]]:
    cases = [Case(name=name, run=three_syncs, args=(name,)) for name in names]
    by_rank = run_ranks(run_cases, world_size, cases, timeout_s=300)
    return {name: [mine[name] for mine in by_rank] for name in names}


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, list[Outcome]]:
    return outcomes(list(KINDS), 2)


@pytest.fixture(scope="module")
def three_ranks() -> dict[str, list[Outcome]]:
    return outcomes(ON_THREE, 3)


@pytest.mark.parametrize("name", KINDS)
def test_two_ranks(two_ranks: dict[str, list[Outcome]], name: str) -> None:
    assert [outcome.error for outcome in two_ranks[name]] == ["", ""]


@pytest.mark.parametrize("name", ON_THREE)
def test_three_ranks(three_ranks: dict[str, list[Outcome]], name: str) -> None:
    assert [outcome.error for outcome in three_ranks[name]] == [""] * 3
