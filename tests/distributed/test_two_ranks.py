"""Two real ranks with a toy model: what travels, who is told of a failure, and what still works afterwards."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

from tests.distributed.exchange_steps import (
    GROUP_TIMEOUT_S,
    Case,
    Outcome,
    differing,
    make_group,
    plan_of,
    producer_for,
    run_cases,
    sync,
)
from wsync.adapters.trainers.exchange import Exchange
from wsync.adapters.trainers.fsdp import FSDPProducer
from wsync.deadline import Deadline
from wsync.digest import digest
from wsync.errors import RankError, SyncTimeout, TransportError, UnsupportedError
from wsync.gather import GatherPlan
from wsync.group import Group
from wsync.plan import Bucket
from wsync.testing.ranks import Rank, run_ranks

PATIENCE_S = 10.0


def toy() -> nn.Sequential:
    """Odd sizes, a parameter smaller than the world, and an embedding."""
    torch.manual_seed(3)
    layers = (nn.Embedding(33, 16), nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 1), nn.Linear(1, 8))
    return nn.Sequential(*layers)


def sharded() -> nn.Sequential:
    model = toy()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """*Collective.* Every tensor by the trainer's own means."""
    state = model.state_dict()
    return {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


def optimizer_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(33)).square().mean().backward()
    optimizer.step()


class CountingGroup(Group):
    """Counts the bytes that this rank gives to others."""

    sent_nbytes = 0

    def transfer(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        deadline: Deadline,
    ) -> None:
        self.sent_nbytes += sum(tensor.numel() for peer, tensor in sends)
        super().transfer(sends, receives, deadline)


def count_traffic(me: Rank) -> tuple[int, int, int]:
    """Bytes sent, bytes held in the trainer's dtype, bytes that the gather plan foresees."""
    model = sharded()
    producer = producer_for(model)
    plan = plan_of(producer, torch.bfloat16, 1 << 20)
    group = CountingGroup(me.rank, me.world_size, PrefixStore("count", me.store), PATIENCE_S)
    producer.prepare(plan, [0], group)
    sync(producer, plan, [0], me.rank)
    held = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    foreseen = GatherPlan(plan, [0], me.rank, me.world_size).traffic_nbytes
    return group.sent_nbytes, held, foreseen


def digests_and_full_tensors(me: Rank) -> tuple[list[int], list[int]]:
    """This rank's digest shares, and the digests of the full tensors in wire dtype."""
    model = sharded()
    producer = producer_for(model)
    plan = plan_of(producer, torch.bfloat16, 1 << 20)
    producer.prepare(plan, [0], make_group(me, "digest"))
    expected = full(model)
    producer.open()
    for name, tensor in producer.named_tensors():
        assert torch.equal(tensor, expected[name]), name
    shares = list(producer.digests([spec.name for spec in plan.specs]))
    wholes = [digest(expected[spec.name].to(spec.dtype), word_bytes=spec.word_bytes) for spec in plan.specs]
    return shares, wholes


class FailsOnce(FSDPProducer):
    """Cannot stage one bucket, the first time."""

    failing_bucket = 1

    def stage(self, bucket: Bucket, slot: torch.Tensor | None) -> None:
        if bucket.index == self.failing_bucket:
            self.failing_bucket = -1
            raise MemoryError("no room for the packed shards")
        super().stage(bucket, slot)


def fail_in_stage(me: Rank) -> str:
    """The session's go/stop with a producer that fails on rank 1; then training and the next sync go on."""
    model = sharded()
    producer: FSDPProducer = FailsOnce(model) if me.rank == 1 else FSDPProducer(model)
    plan = plan_of(producer, torch.bfloat16, 512)
    group = make_group(me, "failing")
    producer.prepare(plan, [0], group)
    producer.open()
    words = ""
    filled = 0
    try:
        for bucket in plan.buckets:
            error: Exception | None = None
            slot = torch.empty(bucket.nbytes, dtype=torch.uint8) if me.rank == 0 else None
            try:
                producer.stage(bucket, slot)
            except MemoryError as caught:
                error = caught
            group.agree(f"bucket {bucket.index}", error, Deadline.after(PATIENCE_S))
            producer.fill(bucket, slot)
            filled += 1
    except (RankError, MemoryError) as caught:
        words = f"{type(caught).__name__} after {filled}: {caught}"
    producer.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    optimizer_step(model)
    group.enter()
    group.reset()
    result = sync(producer, plan, [0], me.rank)
    expected = full(model)
    assert me.rank or not differing(result, expected, torch.bfloat16)
    return words


def lose_a_rank(me: Rank) -> float:
    """Rank 1 is killed when it should send. Seconds until rank 0 has an error."""
    model = sharded()
    producer = producer_for(model)
    plan = plan_of(producer, torch.bfloat16, 512)
    producer.prepare(plan, [0], make_group(me, "killed"))
    producer.open()
    slot = torch.empty(plan.capacity, dtype=torch.uint8) if me.rank == 0 else None
    for bucket in plan.buckets:
        if me.rank == 1 and bucket.index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        producer.stage(bucket, slot)
        begun = time.monotonic()
        try:
            producer.fill(bucket, slot)
        except (TransportError, SyncTimeout):
            assert bucket.index == 2
            return time.monotonic() - begun
    raise AssertionError("the death of rank 1 went unnoticed")


def export_partial_sum(me: Rank) -> str:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    with pytest.raises(UnsupportedError) as caught:
        producer_for(module).metadata()
    return str(caught.value)


def mixed_module(me: Rank) -> None:
    """A sharded half, and a half that every rank holds whole."""
    model = toy()
    model.register_buffer("steps", torch.tensor(12))
    fully_shard(model[0])
    fully_shard(model[3])
    producer = producer_for(model)
    plan = plan_of(producer, torch.float32, 256)
    producer.prepare(plan, [1], make_group(me, "mixed"))
    result = sync(producer, plan, [1], me.rank)
    expected = full(model)
    assert me.rank == 0 or not differing(result, expected, torch.float32)


class Beside(FSDPProducer):
    """Takes every slot for one on another device."""

    def _near(self, exchange: Exchange, slot: torch.Tensor | None) -> torch.Tensor | None:
        if slot is None or not exchange.exchanged:
            return slot
        if self._beside is None:
            self._beside = torch.full((1 << 20,), 0x3C, dtype=torch.uint8)
        return self._beside


def slots_on_another_device(me: Rank) -> tuple[int, int]:
    """What is exchanged goes by memory beside the shards; bytes of it, and what the producer says that it keeps."""
    model = sharded()
    producer = Beside(model)
    plan = plan_of(producer, torch.bfloat16, 512)
    producer.prepare(plan, [0, 1], make_group(me, "beside"))
    for _ in range(2):
        result = sync(producer, plan, [0, 1], me.rank)
        assert not differing(result, full(model), torch.bfloat16)
        optimizer_step(model)
    assert producer._beside is not None
    return producer._beside.numel(), producer.staging_bytes


CASES = (
    count_traffic,
    digests_and_full_tensors,
    fail_in_stage,
    export_partial_sum,
    mixed_module,
    slots_on_another_device,
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    """Every case by its function's name: the outcome on each rank."""
    by_rank = run_ranks(run_cases, 2, [Case(name=case.__name__, run=case) for case in CASES], timeout_s=90)
    return {case.__name__: [mine[case.__name__] for mine in by_rank] for case in CASES}


def results(outcomes: dict[str, list[Outcome]], case: Callable[..., object]) -> list[Any]:
    assert [outcome.error for outcome in outcomes[case.__name__]] == ["", ""]
    return [outcome.result for outcome in outcomes[case.__name__]]


def test_shards_are_cast_before_they_travel_and_only_to_the_sender(outcomes: dict[str, list[Outcome]]) -> None:
    sender, other = results(outcomes, count_traffic)
    assert sender[0] == sender[2] == 0
    sent, held_fp32, foreseen = other
    assert foreseen == held_fp32 // 2
    assert foreseen <= sent <= foreseen + 16 * len(list(toy().parameters()))


def test_digest_shares_add_up_and_named_tensors_are_whole(outcomes: dict[str, list[Outcome]]) -> None:
    (one, wholes), (other, _) = results(outcomes, digests_and_full_tensors)
    assert [(a + b) % 2**64 for a, b in zip(one, other, strict=True)] == wholes


def test_a_rank_that_fails_stops_the_others_between_collectives(outcomes: dict[str, list[Outcome]]) -> None:
    waiting, failing = results(outcomes, fail_in_stage)
    assert waiting.startswith("RankError after 1: ")
    assert "rank 1: MemoryError: no room for the packed shards" in waiting
    assert failing == "MemoryError after 1: no room for the packed shards"


def test_a_partial_sum_is_refused_by_name(outcomes: dict[str, list[Outcome]]) -> None:
    for words in results(outcomes, export_partial_sum):
        assert words.startswith("weight is Partial(sum) on mesh axis 0; only shards and replicas can be exported")


def test_plain_parameters_and_empty_shards_mix_with_sharded_ones(outcomes: dict[str, list[Outcome]]) -> None:
    assert results(outcomes, mixed_module) == [None, None]


def test_slots_on_another_device_are_filled_from_memory_beside_the_shards(outcomes: dict[str, list[Outcome]]) -> None:
    for beside, kept in results(outcomes, slots_on_another_device):
        assert kept >= beside > 0


def test_the_death_of_a_rank_is_an_error_within_the_deadline() -> None:
    seconds, _ = run_ranks(lose_a_rank, 2, timeout_s=60, expected_dead={1})
    assert seconds < GROUP_TIMEOUT_S + 5
