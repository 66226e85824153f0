"""The region algebra against plain Python lists of positions."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wsync import regions
from wsync.regions import Region, compress, uncovered

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def positions(region: Region) -> list[int]:
    """What the region enumerates, the slow way."""
    found = [region.offset]
    for size, stride in zip(region.sizes, region.strides, strict=True):
        found = [first + i * stride for first in found for i in range(size)]
    return found


def joined(parts: tuple[Region, ...]) -> list[int]:
    return [position for part in parts for position in positions(part)]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """A hyper-rectangle of a tensor of `shape`, or a contiguous span of it."""
    if draw(st.booleans()):
        start = draw(st.integers(0, math.prod(shape)))
        return Region.span(start, draw(st.integers(0, math.prod(shape) - start)))
    offsets = [draw(st.integers(0, size)) for size in shape]
    return Region.box(shape, offsets, [draw(st.integers(0, s - o)) for s, o in zip(shape, offsets, strict=True)])


@st.composite
def any_monotone(draw: st.DrawFn) -> Region:
    """Strides with no common grid: any nested run that never goes back."""
    sizes, strides, reach = [], [], 0
    for _ in range(draw(st.integers(0, 4))):
        size, stride = draw(st.integers(0, 4)), reach + draw(st.integers(1, 3))
        sizes.append(size)
        strides.append(stride)
        reach += max(size - 1, 0) * stride
    return Region(draw(st.integers(0, 30)), tuple(reversed(sizes)), tuple(reversed(strides)))


@st.composite
def on_a_grid(draw: st.DrawFn) -> Region:
    """Strides are powers of two, so that any two share a grid, but rows begin and end anywhere on it."""
    sizes, strides, reach = [], [], 0
    for _ in range(draw(st.integers(0, 3))):
        size, stride = draw(st.integers(1, 9)), (1 << reach.bit_length()) << draw(st.integers(0, 1))
        sizes.append(size)
        strides.append(stride)
        reach += (size - 1) * stride
    return Region(draw(st.integers(0, 30)), tuple(reversed(sizes)), tuple(reversed(strides)))


@st.composite
def anything(draw: st.DrawFn) -> Region:
    """Also regions that repeat or go back."""
    rank = draw(st.integers(0, 4))
    sizes = tuple(draw(st.integers(0, 4)) for _ in range(rank))
    return Region(draw(st.integers(0, 40)), sizes, tuple(draw(st.integers(-9, 12)) for _ in range(rank)))


shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
pairs_in_a_shape = shapes.flatmap(lambda shape: st.tuples(boxes(shape), boxes(shape)))
pairs = st.one_of(pairs_in_a_shape, st.tuples(on_a_grid(), on_a_grid()), st.tuples(any_monotone(), any_monotone()))


@given(anything())
def test_bounds_numel_and_monotone_say_what_the_enumeration_does(region: Region) -> None:
    listed = positions(region)
    assert region.numel == len(listed)
    assert region.bounds == ((min(listed), max(listed) + 1) if listed else (0, 0))
    assert region.is_monotone == all(a < b for a, b in pairwise(listed))


@given(anything())
def test_coalesce_keeps_the_enumeration_and_is_idempotent(region: Region) -> None:
    short = region.coalesce()
    assert positions(short) == positions(region)
    assert short.coalesce() == short
    assert len(short.sizes) <= max(len(region.sizes), 1)


@given(anything())
def test_runs_list_the_enumeration(region: Region) -> None:
    starts, length = region.runs()
    assert [start + i for start in starts.tolist() for i in range(length)] == positions(region)
    assert starts.dtype == np.int64
    assert length == region.run_length


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes(shape))))
def test_box_is_what_slicing_gives(case: tuple[tuple[int, ...], Region]) -> None:
    shape, _ = case
    full = torch.arange(math.prod(shape)).view(shape)
    assert positions(Region.whole(shape)) == full.flatten().tolist()
    half = [size // 2 for size in shape]
    rest = [size - h for size, h in zip(shape, half, strict=True)]
    box = Region.box(shape, half, rest)
    sliced = full[tuple(slice(h, None) for h in half)]
    assert positions(box) == sliced.flatten().tolist()
    assert torch.equal(box.view(full.view(-1)), sliced)


@settings(max_examples=400)
@given(pairs)
def test_intersect_is_the_set_intersection_in_order(pair: tuple[Region, Region]) -> None:
    a, b = pair
    assert joined(a.intersect(b)) == sorted(set(positions(a)) & set(positions(b)))


@settings(max_examples=400)
@given(pairs)
def test_locate_gives_ordinals_and_select_goes_back(pair: tuple[Region, Region]) -> None:
    whole, other = pair
    listed = positions(whole)
    for part in whole.intersect(other):
        ordinals = whole.locate(part)
        assert [listed[i] for i in joined(ordinals)] == positions(part)
        assert [p for o in ordinals for p in joined(whole.select(o))] == positions(part)


@given(pairs)
def test_locate_refuses_what_is_not_inside(pair: tuple[Region, Region]) -> None:
    whole, part = pair
    if set(positions(part)) <= set(positions(whole)):
        assert len(joined(whole.locate(part))) == part.numel
    else:
        with pytest.raises(ValueError, match="not inside"):
            whole.locate(part)


@given(any_monotone(), anything())
def test_locate_keeps_the_order_of_a_part_that_goes_back(whole: Region, order: Region) -> None:
    listed = positions(whole)
    low, high = order.bounds
    if low < 0 or high > len(listed):
        return
    for part in whole.select(order):
        assert [listed[i] for i in joined(whole.locate(part))] == positions(part)


@settings(max_examples=400)
@given(anything(), st.one_of(any_monotone(), anything()))
def test_select_reads_any_region_by_ordinals(region: Region, ordinals: Region) -> None:
    low, high = ordinals.bounds
    if low < 0 or high > region.numel:
        with pytest.raises(ValueError, match="ordinals"):
            region.select(ordinals)
    else:
        listed = positions(region)
        assert joined(region.select(ordinals)) == [listed[i] for i in positions(ordinals)]


@given(anything(), st.integers(-5, 5))
def test_translate_moves_every_position(region: Region, by: int) -> None:
    assert positions(region.translate(by)) == [position + by for position in positions(region)]


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), max_size=30))
def test_compress_keeps_any_list_of_runs_in_order(runs: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in runs], np.int64)
    lengths = np.array([length for _, length in runs], np.int64)
    parts = compress(starts, lengths)
    assert joined(parts) == [start + i for start, length in runs for i in range(length)]
    assert all(part.coalesce() == part and part.numel for part in parts)


@given(shapes.flatmap(boxes))
def test_compress_finds_a_box_again(region: Region) -> None:
    starts, length = region.runs()
    assert len(compress(starts, np.full(len(starts), length))) <= max(1, len(region.coalesce().sizes))


@st.composite
def spans(draw: st.DrawFn) -> list[Region]:
    found = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=6))
    return [Region.span(start, count) for start, count in found]


@given(spans())
def test_uncovered_by_spans_is_the_complement(parts: list[Region]) -> None:
    left = uncovered(parts, 40)
    assert joined(left) == sorted(set(range(40)) - {p for part in parts for p in positions(part)})
    assert all(a.bounds[1] < b.bounds[0] for a, b in pairwise(left))


parts_of_a_shape = shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes(shape), max_size=5)))


@given(parts_of_a_shape, st.booleans())
def test_uncovered_is_the_complement(case: tuple[tuple[int, ...], list[Region]], by_mask: bool) -> None:
    shape, parts = case
    with pytest.MonkeyPatch.context() as patch:
        if by_mask:
            patch.setattr(regions, "_MANY_RUNS", 0)
        left = uncovered(parts, math.prod(shape))
        assert joined(left) == sorted(set(range(math.prod(shape))) - {p for part in parts for p in positions(part)})


@given(anything(), st.booleans())
def test_uncovered_takes_parts_that_go_back_and_refuses_those_outside(part: Region, by_mask: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if by_mask:
            patch.setattr(regions, "_MANY_RUNS", 0)
        low, high = part.bounds
        if low < 0 or high > 50:
            with pytest.raises(ValueError, match="outside"):
                uncovered([part], 50)
        else:
            assert joined(uncovered([part], 50)) == sorted(set(range(50)) - set(positions(part)))


def test_shards_slices_and_experts_meet_in_one_region_each() -> None:
    columns = Region.box((4096, 11008), (0, 5504), (4096, 2752))
    others = Region.box((4096, 11008), (0, 4000), (4096, 4000))
    assert columns.intersect(others) == (Region(5504, (4096, 2496), (11008, 1)),)
    (ordinals,) = columns.locate(columns.intersect(others)[0])
    assert ordinals == Region(0, (4096, 2496), (2752, 1))
    expert = Region.box((64, 1024, 512), (7, 0, 0), (1, 512, 512))
    rows = Region.span(7 * 1024 * 512 - 100, 300)
    assert expert.intersect(rows) == (Region.span(7 * 1024 * 512, 200),)
    single = Region.box((8192, 4096, 2), (0, 0, 1), (8192, 4096, 1))
    assert single.intersect(Region.box((8192, 4096, 2), (9, 9, 0), (500, 700, 2))) == (
        Region((9 * 4096 + 9) * 2 + 1, (500, 700), (8192, 2)),
    )


def test_a_long_list_of_irregular_runs_still_meets_exactly() -> None:
    generator = np.random.default_rng(5)
    a = Region(3, (500, 4), (9, 1))
    listed = positions(a)
    b = Region(int(generator.integers(0, 9)), (560, 5), (8, 1))
    want = np.intersect1d(listed, positions(b))
    parts = a.intersect(b)
    assert joined(parts) == want.tolist()
    assert [listed[i] for i in joined(tuple(o for p in parts for o in a.locate(p)))] == want.tolist()


def test_set_operations_refuse_regions_that_go_back() -> None:
    back = Region(0, (2, 3), (1, 2))
    for a, b in ((back, Region.span(0, 3)), (Region.span(0, 3), back)):
        with pytest.raises(ValueError, match="not monotone"):
            a.intersect(b)
    with pytest.raises(ValueError, match="not monotone"):
        back.locate(Region.span(0, 1))


@pytest.mark.parametrize(
    ("shape", "offsets", "sizes"),
    [((4, 4), (0, 1), (4, 4)), ((4,), (-1,), (2,)), ((4, 4), (0,), (4,)), ((4,), (0,), (-1,)), ((), (0,), (1,))],
)
def test_box_outside_of_its_shape_is_refused(
    shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="not inside shape"):
        Region.box(shape, offsets, sizes)


def test_malformed_regions_are_refused() -> None:
    with pytest.raises(ValueError, match="not a region"):
        Region(0, (2, 3), (1,))
    with pytest.raises(ValueError, match="not a region"):
        Region(0, (-2,), (1,))


def test_view_starts_where_its_tensor_does_and_stays_inside() -> None:
    storage = torch.arange(100)
    flat = storage[10:34]
    assert Region.box((4, 6), (1, 2), (3, 2)).view(flat).tolist() == [[18, 19], [24, 25], [30, 31]]
    assert Region(5, (), ()).view(flat).item() == 15
    assert Region(999, (0, 3), (3, 1)).view(flat).shape == (0, 3)
    Region.span(0, 2).view(flat).fill_(-1)
    assert storage[9:13].tolist() == [9, -1, -1, 12]
    with pytest.raises(ValueError, match="24 elements"):
        Region.span(20, 5).view(flat)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1), (5,)])
def test_small_tensors_cover_themselves(shape: tuple[int, ...]) -> None:
    whole = Region.whole(shape)
    assert whole.numel == math.prod(shape)
    assert uncovered([whole], whole.numel) == ()
    assert bool(uncovered([], whole.numel)) == (whole.numel > 0)
    assert joined(whole.intersect(whole)) == list(range(whole.numel))
