"""Paired regions against plain lists of positions."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from wsync.regions import Region
from wsync.strided import ascending, cut, pair, positions


def listed(region: Region) -> list[int]:
    indices = itertools.product(*map(range, region.sizes))
    return [region.offset + sum(map(int.__mul__, index, region.strides)) for index in indices]


@st.composite
def views(draw: st.DrawFn) -> tuple[list[int], tuple[int, list[int]], tuple[int, list[int]]]:
    """Sizes, and two views of them whose dims lie in any order with gaps between their rows."""
    sizes = draw(st.lists(st.integers(0, 4), max_size=4))

    def view() -> tuple[int, list[int]]:
        strides, step = [0] * len(sizes), 1
        for dim in draw(st.permutations(range(len(sizes)))):
            step *= draw(st.integers(1, 2))
            strides[dim] = step
            step *= max(sizes[dim], 1)
        return draw(st.integers(0, 9)), strides

    return sizes, view(), view()


@given(views())
def test_a_pair_joins_the_same_elements_and_reads_the_first_in_order(
    views: tuple[list[int], tuple[int, list[int]], tuple[int, list[int]]],
) -> None:
    sizes, first, second = views
    found = pair(sizes, first, second)
    assert found is not None
    one, other = found
    assert one.sizes == other.sizes
    expected = zip(
        listed(Region(first[0], tuple(sizes), tuple(first[1]))),
        listed(Region(second[0], tuple(sizes), tuple(second[1]))),
        strict=True,
    )
    assert list(zip(listed(one), listed(other), strict=True)) == sorted(expected)
    assert listed(ascending(other)) == sorted(listed(other))


@given(views(), st.integers(0, 60), st.integers(0, 60))
def test_a_cut_keeps_what_lies_in_the_range_in_its_order(
    views: tuple[list[int], tuple[int, list[int]], tuple[int, list[int]]], low: int, high: int
) -> None:
    found = pair(*views)
    assert found is not None
    kept = []
    for one, other in cut(*found, low, high):
        assert one.sizes == other.sizes
        kept += list(zip(listed(one), listed(other), strict=True))
    both = zip(listed(found[0]), listed(found[1]), strict=True)
    assert kept == [(position, other) for position, other in both if low <= position < high]


def test_expanded_and_interleaved_views() -> None:
    assert pair([3, 4], (0, (0, 1)), (0, (4, 1))) is None
    assert positions(0, [3, 4], [0, 1]) == Region(0, (4,), (1,))
    assert pair([3, 4], (0, (2, 1)), (0, (4, 1))) is None
