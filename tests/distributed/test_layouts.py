"""Transformers models under every layout, on 2, 3 and 4 real ranks: each sender's buckets hold the full tensors' bytes.

One set of ranks goes through all layouts of its size; each layout is then a test of its own.
"""

import pytest
import torch

from tests.distributed.exchange_steps import (
    Case,
    Outcome,
    differing,
    make_group,
    plan_of,
    producer_for,
    run_cases,
    sync,
)
from tests.distributed.sharded_models import LAYOUTS, full_tensors, train_step
from wsync.testing.ranks import Rank, run_ranks

ON_FOUR = ["hsdp", "fsdp2 over tp", "fsdp2 over tp uneven"]
ON_THREE = ["fsdp2", "fsdp2 moe"]
ON_TWO = [name for name in LAYOUTS if name not in ON_FOUR]


def three_syncs(me: Rank, name: str) -> None:
    """Each after a training step and a forward without gradients, which leaves an FSDP2 root unsharded.

    One sender, then all; a bucket that cuts every large tensor, and one that holds the whole model.
    """
    model = LAYOUTS[name]()
    producer = producer_for(model)
    group = make_group(me, name)
    everyone = list(range(me.world_size))
    for senders, dtype, limit in (([0], torch.bfloat16, 4096), (everyone, torch.float32, 1 << 20)):
        plan = plan_of(producer, dtype, limit)
        producer.prepare(plan, senders, group)
        for step in range(3):
            train_step(model, step)
            result = sync(producer, plan, senders, me.rank)
            expected = full_tensors(model)
            if me.rank in senders:
                assert differing(result, expected, dtype) == [], (senders, step)
    group.close()


def outcomes(names: list[str], world_size: int) -> dict[str, list[Outcome]]:
    cases = [Case(name=name, run=three_syncs, args=(name,)) for name in names]
    by_rank = run_ranks(run_cases, world_size, cases, timeout_s=300)
    return {name: [mine[name] for mine in by_rank] for name in names}


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, list[Outcome]]:
    return outcomes(ON_TWO, 2)


@pytest.fixture(scope="module")
def three_ranks() -> dict[str, list[Outcome]]:
    return outcomes(ON_THREE, 3)


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, list[Outcome]]:
    return outcomes(ON_FOUR, 4)


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks(two_ranks: dict[str, list[Outcome]], name: str) -> None:
    assert [outcome.error for outcome in two_ranks[name]] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_THREE)
def test_three_ranks(three_ranks: dict[str, list[Outcome]], name: str) -> None:
    assert [outcome.error for outcome in three_ranks[name]] == [""] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks(four_ranks: dict[str, list[Outcome]], name: str) -> None:
    assert [outcome.error for outcome in four_ranks[name]] == [""] * 4
