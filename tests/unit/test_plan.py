"""Packing is pure layout: aligned, within the limit, in order, the same everywhere."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wsync import wire
from wsync.errors import ConfigError, MismatchError
from wsync.plan import ALIGNMENT_BYTES, Owner, Plan, TensorSpec
from wsync.regions import Region, uncovered

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

DTYPES = [
    torch.bool,
    torch.int8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


def spec(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8, group: str | None = None) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, atomic_group=group)


@st.composite
def spec_lists(draw: st.DrawFn) -> list[TensorSpec]:
    shapes = st.lists(st.integers(0, 12), max_size=4).map(tuple)
    groups = st.sampled_from([None, None, None, "a", "b"])
    rows = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), groups), max_size=15))
    return [spec(f"t{i}", shape, dtype, group) for i, (shape, dtype, group) in enumerate(rows)]


limits = st.integers(ALIGNMENT_BYTES, 8192)


@given(spec_lists(), limits)
def test_every_byte_has_one_aligned_place_within_the_limit(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = Plan.pack(specs, bucket_bytes)
    held: dict[str, list[Region]] = {s.name: [] for s in specs}
    for index, bucket in enumerate(plan.buckets):
        assert bucket.index == index
        assert bucket.nbytes <= plan.capacity <= bucket_bytes
        end = 0
        for meta in bucket.tensors:
            assert meta.offset % ALIGNMENT_BYTES == 0
            assert meta.offset >= end
            end = meta.offset + meta.chunk_nbytes
            assert (meta.shape, meta.dtype) == (plan.spec(meta.name).shape, plan.spec(meta.name).dtype)
            held[meta.name].append(Region.span(meta.chunk_offset, meta.chunk_nbytes))
        assert end == bucket.nbytes
    for s in specs:
        assert held[s.name], "a tensor was left out"
        assert not uncovered(held[s.name], s.nbytes)
        assert sum(part.numel for part in held[s.name]) == s.nbytes
    assert plan.specs == tuple(specs)
    assert plan.nbytes == sum(s.nbytes for s in specs)
    assert plan.capacity % ALIGNMENT_BYTES == 0


@given(spec_lists(), limits)
def test_chunks_are_cut_at_alignment_and_only_where_needed(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = Plan.pack(specs, bucket_bytes)
    limit = bucket_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    for bucket in plan.buckets:
        for meta in bucket.tensors:
            size = plan.spec(meta.name).nbytes
            assert meta.is_whole == (size <= limit)
            assert meta.chunk_offset % ALIGNMENT_BYTES == meta.chunk_offset % meta.dtype.itemsize == 0
            if not meta.is_whole and meta.chunk_offset + meta.chunk_nbytes < size:
                assert meta.chunk_nbytes == limit


@given(spec_lists(), limits)
def test_groups_stay_together_and_the_rest_in_order(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = Plan.pack(specs, bucket_bytes)
    placed = [(bucket.index, meta.name) for bucket in plan.buckets for meta in bucket.tensors]
    order = list(dict.fromkeys(name for _, name in placed))
    seen: dict[str, None] = {}
    for s in specs:
        for member in [s] if s.atomic_group is None else [m for m in specs if m.atomic_group == s.atomic_group]:
            seen[member.name] = None
    assert order == list(seen)
    for group in ("a", "b"):
        members = [s for s in specs if s.atomic_group == group]
        alone = Plan.pack(members, bucket_bytes)
        names = {s.name for s in members}
        if len(alone.buckets) == 1:
            assert len({index for index, name in placed if name in names}) == 1


@given(spec_lists(), limits)
def test_a_bucket_is_left_only_when_full(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = Plan.pack([replace(s, atomic_group=None) for s in specs], bucket_bytes)
    for bucket, following in zip(plan.buckets, plan.buckets[1:], strict=False):
        first = following.tensors[0]
        wanted = bucket.tensors[-1].chunk_nbytes if first.chunk_offset else min(first.chunk_nbytes, bucket_bytes)
        end = math.ceil(bucket.nbytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        assert end + wanted > bucket_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def test_alignment_counts_before_the_fit() -> None:
    specs = [spec("a", (1,)), spec("b", (300,))]
    assert len(Plan.pack(specs, 512).buckets) == 2
    assert len(Plan.pack(specs, 768).buckets) == 1
    assert [len(b.tensors) for b in Plan.pack([spec("a", (512,)), spec("b", (0,))], 512).buckets] == [2]


def test_views_write_through_to_the_bytes_of_a_slot() -> None:
    specs = [
        spec("i", (3,), torch.int8),
        spec("b", (5, 7), torch.bfloat16),
        spec("s", (), torch.float64),
        spec("e", (0, 4), torch.complex128),
    ]
    plan = Plan.pack(specs, 4096)
    slot = torch.randint(0, 255, (plan.capacity,), dtype=torch.uint8)
    before = slot.clone()
    (bucket,) = plan.buckets
    for meta, view in bucket.views(slot):
        assert (view.shape, view.dtype) == (plan.spec(meta.name).shape, meta.dtype)
        assert meta.elements == Region.span(0, view.numel())
        view.copy_(torch.randn(view.shape).to(view.dtype))
    touched = {i for m in bucket.tensors for i in range(m.offset, m.offset + m.chunk_nbytes)}
    rest = [i for i in range(plan.capacity) if i not in touched]
    assert torch.equal(slot[rest], before[rest])
    assert not torch.equal(slot, before)


def test_a_chunk_is_a_flat_view_of_its_elements() -> None:
    plan = Plan.pack([spec("w", (100, 3), torch.float32)], 512)
    slot = torch.zeros(512, dtype=torch.uint8)
    metas = [meta for bucket in plan.buckets for meta in bucket.tensors]
    assert [meta.elements for meta in metas] == [Region.span(0, 128), Region.span(128, 128), Region.span(256, 44)]
    assert [tuple(meta.view(slot).shape) for meta in metas] == [(128,), (128,), (44,)]


def test_names_that_come_twice_are_refused_before_anything_is_packed() -> None:
    specs = [spec(f"t{i}", (1,)) for i in range(7)]
    with pytest.raises(ConfigError, match=r"7 tensor names.*t0, t1, t2, t3, t4 and 2 more"):
        Plan.pack(specs + specs, 4096)
    with pytest.raises(ConfigError, match="255"):
        Plan.pack(specs, 255)


def test_an_unknown_name_is_an_error_that_says_so() -> None:
    plan = Plan.pack([spec("w", (1,))], 4096)
    assert plan.spec("w").name == "w"
    with pytest.raises(MismatchError, match="'v'"):
        plan.spec("v")


def test_plans_without_bytes_still_have_their_tensors() -> None:
    plan = Plan.pack([spec("e", (0,)), spec("f", (2, 0), torch.bfloat16)], 256)
    assert [meta.name for bucket in plan.buckets for meta in bucket.tensors] == ["e", "f"]
    assert (plan.nbytes, plan.capacity, len(plan.buckets)) == (0, 256, 1)
    assert Plan.pack([], 256).buckets == ()


def test_without_owners_the_layout_is_the_same() -> None:
    specs = [spec("w", (64, 3), torch.float32), spec("v", (5,), torch.bfloat16)]
    owned = [replace(s, owners=(Owner(rank=3, region=Region.whole(s.shape)),), word_bytes=2) for s in specs]
    plan = Plan.pack(owned, 512)
    assert plan.without_owners() == Plan.pack([replace(s, word_bytes=2) for s in specs], 512)
    assert plan.without_owners().spec("v").owners == ()


def test_senders_take_turns() -> None:
    specs = [TensorSpec(name=str(number), shape=(64,), dtype=torch.float32) for number in range(5)]
    plan = Plan.pack(specs, 256).in_turns([2, 0])
    assert [bucket.sender for bucket in plan.buckets] == [2, 0, 2, 0, 2]
    assert plan.turns == [2, 0]
    assert [bucket.index for bucket in plan.sent_by(0).buckets] == [1, 3]
    values = torch.arange(64, dtype=torch.float32)
    [view] = plan.sent_by(0).views(plan.buckets[3], values.view(torch.uint8))
    assert torch.equal(view, values), "places are those of the whole plan"
    assert Plan.pack(specs, 256).turns == []
    assert wire.unpack(wire.pack(plan)) == plan
