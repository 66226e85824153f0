"""Gather plans: simulated ranks move index tensors exactly as the plan says, and every sender gets the whole bucket."""

import zlib

import torch
from hypothesis import given
from hypothesis import strategies as st

from wsync.gather import GatherPlan, Part, aligned
from wsync.plan import Bucket, Owner, Plan, TensorSpec
from wsync.regions import Region


def shards(shape: tuple[int, ...], dim: int, world: int) -> list[Region]:
    """Ceil-sized shards along `dim`, one a rank; the last ones may be short or empty."""
    chunk = -(-shape[dim] // world)
    regions = []
    for rank in range(world):
        start = min(rank * chunk, shape[dim])
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, min(chunk, shape[dim] - start)
        regions.append(Region.box(shape, offsets, sizes))
    return regions


def spec(name: str, shape: tuple[int, ...], regions: dict[int, Region], dtype: torch.dtype = torch.int32) -> TensorSpec:
    owners = tuple(Owner(rank=rank, region=region) for rank, region in regions.items())
    return TensorSpec(name=name, shape=shape, dtype=dtype, owners=owners)


def values(one: TensorSpec) -> torch.Tensor:
    """The full tensor, flat: every element of every tensor has a value of its own."""
    return torch.arange(one.numel, dtype=torch.int32) + 1000 * (zlib.crc32(one.name.encode()) % 1000 + 1)


class Simulation:
    """All ranks of a plan at once."""

    def __init__(self, plan: Plan, senders: list[int], world: int) -> None:
        self.plan = plan
        self.senders = senders
        self.ranks = [GatherPlan(plan, senders, rank, world) for rank in range(world)]
        self.full = {one.name: values(one) for one in plan.specs}

    def run(self) -> None:
        for bucket in self.plan.buckets:
            for sender in self.senders:
                expected = torch.full((bucket.nbytes // 4,), -1, dtype=torch.int32)
                for meta in bucket.tensors:
                    expected[meta.offset // 4 :][: meta.elements.numel] = meta.elements.view(self.full[meta.name])
                assert torch.equal(self.slot(bucket, sender), expected), f"bucket {bucket.index} at sender {sender}"

    def slot(self, bucket: Bucket, sender: int) -> torch.Tensor:
        slot = torch.full((bucket.nbytes // 4,), -1, dtype=torch.int32)
        mine = self.ranks[sender].buckets[bucket.index]
        for part in mine.own:
            self.put(slot, part, self.held(part))
        for source, other in enumerate(self.ranks):
            theirs = other.buckets[bucket.index]
            sent = [theirs.packets[index] for receiver, index in theirs.sends if receiver == sender]
            assert sent == [packet for rank, packet in mine.receives if rank == source]
        for _, packet in mine.receives:
            for part in packet.parts:
                self.put(slot, part, self.held(part))
        return slot

    def held(self, part: Part) -> torch.Tensor:
        return part.source.view(part.owner.view(self.full[part.tensor.name]).flatten().clone())

    def put(self, slot: torch.Tensor, part: Part, elements: torch.Tensor) -> None:
        place = part.slot.translate(part.tensor.offset // 4).view(slot)
        assert place.shape == elements.shape
        assert bool((place == -1).all()), "an element is delivered twice"
        place.copy_(elements)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[TensorSpec], list[int], int]:
    world = draw(st.integers(1, 4))
    specs = []
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
        kind = draw(st.sampled_from(["replica", "shard", "one", "hybrid"]))
        if kind == "shard":
            regions = dict(enumerate(shards(shape, draw(st.integers(0, len(shape) - 1)), world)))
        elif kind == "hybrid" and world == 4:
            halves = shards(shape, draw(st.integers(0, len(shape) - 1)), 2)
            regions = {rank: halves[rank % 2] for rank in range(world)}
        elif kind == "one":
            regions = {draw(st.integers(0, world - 1)): Region.whole(shape)}
        else:
            regions = {rank: Region.whole(shape) for rank in range(world)}
        specs.append(spec(f"t{index}", shape, regions))
    senders = draw(st.sets(st.integers(0, world - 1), min_size=1))
    return specs, sorted(senders), world


@given(layouts(), st.sampled_from([256, 512, 4096]))
def test_every_sender_gets_every_element_once(layout: tuple[list[TensorSpec], list[int], int], limit: int) -> None:
    specs, senders, world = layout
    Simulation(Plan.pack(specs, limit), senders, world).run()


def test_a_sender_uses_what_it_holds_and_replicas_share_the_rest() -> None:
    halves = shards((64, 4), 0, 2)
    specs = [spec(f"t{i}", (64, 4), {rank: halves[rank % 2] for rank in range(4)}) for i in range(8)]
    plan = Plan.pack(specs, 1 << 20)
    sent = [GatherPlan(plan, [0], rank, 4).traffic_nbytes for rank in range(4)]
    half = sum(one.nbytes for one in specs) // 2
    assert sent == [0, half // 2, 0, half // 2]


def test_a_part_that_everyone_wants_is_packed_once() -> None:
    thirds = dict(enumerate(shards((7, 5), 0, 3)))
    plan = Plan.pack([spec("t", (7, 5), thirds)], 4096)
    [mine] = GatherPlan(plan, [0, 1, 2], 2, 3).buckets
    assert len(mine.packets) == 1
    assert mine.sends == ((0, 0), (1, 0))


def test_large_contiguous_parts_travel_alone_and_are_received_in_place() -> None:
    shape = (512, 512)
    rows = spec("rows", shape, dict(enumerate(shards(shape, 0, 2))))
    columns = spec("columns", shape, dict(enumerate(shards(shape, 1, 2))))
    bias = spec("bias", (512,), dict(enumerate(shards((512,), 0, 2))))
    plan = Plan.pack([rows, columns, bias], 1 << 24)
    Simulation(plan, [0], 2).run()
    [sender] = GatherPlan(plan, [0], 0, 2).buckets
    names = [([part.tensor.name for part in packet.parts], packet.in_place) for _, packet in sender.receives]
    assert names == [(["columns", "bias"], False), (["rows"], True)]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_aligned_pairs_go_element_to_element(a: int, b: int, c: int, d: int) -> None:
    one = Region(0, (a * b, c * d), (c * d + 3, 1))
    other = (Region(5, (a, b * c), (b * c * 2, 2)),) * d
    count = a * b * c
    pairs = aligned([piece for row in range(d) for piece in one.select(Region.span(row * count, count))], other)
    memory = torch.arange(10_000)
    left = torch.cat([first.view(memory).reshape(-1) for first, _ in pairs])
    right = torch.cat([second.view(memory).reshape(-1) for _, second in pairs])
    assert all(first.sizes == second.sizes for first, second in pairs)
    assert torch.equal(left, one.view(memory).reshape(-1))
    assert torch.equal(right, torch.cat([region.view(memory).reshape(-1) for region in other]))
