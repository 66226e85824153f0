"""Tensors that are handed over where they lie, to processes that map the memory."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.contract.arena import Arena, ArenaTransport
from wsync.errors import PeerError, ProtocolError, TransportError
from wsync.plan import Plan, TensorSpec
from wsync.regions import Region
from wsync.testing.bench import Bench, check_equal, expect
from wsync.testing.samples import plan_of, random_tensor, tensor_zoo, tiny_tensors
from wsync.transports.references import Openings
from wsync.views import Place

BENCH = Bench(make=ArenaTransport, processes=True, timeout_s=60)
Tensors = dict[str, torch.Tensor]


def whole(tensors: Tensors) -> Plan:
    """One bucket, of any size."""
    return replace(plan_of(tensors, sum(tensor.nbytes + 512 for tensor in tensors.values())), in_place=True)


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    made = [Arena(4 << 20), Arena(4 << 20)]
    yield made
    for arena in made:
        arena.close()


def values(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": random_tensor((3 + i, 50), torch.float32, generator) for i in range(8)}


def test_values_addresses_and_allocations_may_change_between_syncs(arenas: list[Arena]) -> None:
    first, second = arenas
    plan = whole(values(0))
    with BENCH.sender(plan, num_slots=0) as sender, BENCH.consumer(sender, plan, syncs=5) as actor:
        sender.accept(BENCH.deadline)
        actor.hear("connected")
        placed = {name: first.put(tensor) for name, tensor in values(1).items()}

        def sync() -> None:
            [bucket] = plan.buckets
            sender.hand_over(bucket, [placed[meta.name] for meta in bucket.tensors])
            sender.drain(BENCH.deadline)
            check_equal(actor.hear("synced"), placed)

        sync()
        for name, tensor in values(2).items():
            placed[name].copy_(tensor)
        sync()
        placed["w3"] = first.put(torch.full((6, 50), 3.5))
        sync()
        placed["w5"] = second.put(torch.full((8, 50), -1.0))
        sync()
        first.close()
        placed = {name: second.put(tensor) for name, tensor in values(3).items()}
        sync()
        before, after = actor.hear("done")
        assert before == after, "what was not needed any more stayed open"


def test_every_dtype_and_shape_and_more_tensors_than_one_frame_describes(arenas: list[Arena]) -> None:
    arena = arenas[0]
    zoo = {name: tensor for name, tensor in tensor_zoo(3, 1 << 18).items() if not tensor.is_conj()}
    tensors = {**zoo, **tiny_tensors(2, 4000)}
    placed = {name: arena.put(tensor) for name, tensor in tensors.items()}
    plan = whole(placed)
    with BENCH.sender(plan, num_slots=0) as sender, BENCH.consumer(sender, plan, syncs=2) as actor:
        sender.accept(BENCH.deadline)
        actor.hear("connected")
        for _ in range(2):
            sender.hand_over(plan.buckets[0], [placed[meta.name] for meta in plan.buckets[0].tensors])
            sender.drain(BENCH.deadline)
            check_equal(actor.hear("synced"), placed)


def test_slots_and_references_take_turns(arenas: list[Arena]) -> None:
    placed = {name: arenas[0].put(tensor) for name, tensor in values(4).items()}
    plan = plan_of(placed, 2048)
    assert len(plan.buckets) > 3
    with BENCH.sender(plan) as sender, BENCH.consumer(sender, plan, syncs=2) as actor:
        sender.accept(BENCH.deadline)
        actor.hear("connected")
        for odd in (0, 1):
            for bucket in plan.buckets:
                if bucket.index % 2 == odd:
                    sender.hand_over(bucket, [placed[meta.name] for meta in bucket.tensors])
                else:
                    slot = sender.acquire(BENCH.deadline)
                    for meta, view in bucket.views(slot):
                        view.copy_(placed[meta.name])
                    sender.commit(bucket)
            sender.drain(BENCH.deadline)
            check_equal(actor.hear("synced"), placed)


def test_memory_that_cannot_be_opened_is_refused_and_nothing_is_sent(arenas: list[Arena]) -> None:
    plan = whole(values(0))
    outside = list(values(0).values())
    assert "is in no arena" in str(ArenaTransport().refuse_references(outside))
    with BENCH.sender(plan, num_slots=0) as sender, BENCH.consumer(sender, plan) as actor:
        sender.accept(BENCH.deadline)
        actor.hear("connected")
        with expect(TransportError, "is in no arena"):
            sender.hand_over(plan.buckets[0], outside)
        with expect(ProtocolError, "has 8 tensors; 7 were handed over"):
            sender.hand_over(plan.buckets[0], outside[1:])
        with expect(ProtocolError, "without slots"):
            sender.acquire(BENCH.deadline)


def test_a_receiver_that_dies_over_what_was_handed_over_is_heard(arenas: list[Arena]) -> None:
    placed = {name: arenas[0].put(tensor) for name, tensor in values(4).items()}
    plan = whole(placed)
    with BENCH.sender(plan, num_slots=0) as sender, BENCH.consumer(sender, plan, kill_at=0) as actor:
        sender.accept(BENCH.deadline)
        actor.hear("connected")
        sender.hand_over(plan.buckets[0], list(placed.values()))
        with expect(PeerError):
            sender.drain(BENCH.deadline)


class _Memory:
    """Opens segments of any name."""

    def open(self, key: str, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


def place(**changes: object) -> Place:
    fields = {"memory": 0, "dtype": torch.float32, "region": Region.whole((4, 4)), **changes}
    return Place(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("segments", "memories", "places", "words"),
    [
        (["a", 64], [0, 0, 64], [], "described 0 tensors"),
        (["a", 64], [0, 0, 64], [place(), place()], "described 2 tensors"),
        (["a", 64], [0, 0, 64], ["w"], "described 0 tensors"),
        (["a", 64], [0, 1, 64], [place()], "outside of its segments"),
        (["a", 64], [0, -4, 64], [place()], "outside of its segments"),
        (["a", 64], [1, 0, 64], [place()], "outside of its segments"),
        (["a", 64], [-1, 0, 64], [place()], "outside of its segments"),
        (["a", 64], [0, 0], [place()], "ends in the middle"),
        (["a", 64], [0, 0, "64"], [place()], "a memory that is none"),
        (["a"], [0, 0, 64], [place()], "ends in the middle"),
        (["a", -64], [0, 0, 64], [place()], "a segment that is none"),
        ([7, 64], [0, 0, 64], [place()], "a segment that is none"),
        (["a", 64], [0, 0, 60], [place()], "outside of its memory"),
        (["a", 64], [0, 0, 64], [place(region=Region(0, (4, 4), (-4, 1)))], "outside of its memory"),
        (["a", 64], [0, 0, 64], [place(memory=1)], "as what it is not"),
        (["a", 64], [0, 0, 64], [place(region=Region.whole((4, 3)))], "as what it is not"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(
    segments: list[object], memories: list[object], places: list[object], words: str
) -> None:
    plan = Plan.pack([TensorSpec(name="w", shape=(4, 4), dtype=torch.float32)], 4096)
    openings = Openings(_Memory())
    for frame in (("segments", *segments), ("memories", *memories), ("places", *places)):
        assert openings.hear(frame)
    with pytest.raises(ProtocolError, match=words):
        openings.views(plan.buckets[0])


def test_a_bucket_that_was_never_described_is_refused() -> None:
    plan = Plan.pack([TensorSpec(name="w", shape=(4, 4), dtype=torch.float32)], 4096)
    with pytest.raises(ProtocolError, match="without a word on where it lies"):
        Openings(_Memory()).views(plan.buckets[0])
    assert not Openings(_Memory()).hear(("commit", 0, 0))
