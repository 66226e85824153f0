"""The examples of docs/regions.md say what the code does."""

from wsync.regions import Region


def test_the_examples_of_the_page_on_regions_hold() -> None:
    assert Region.box((3, 8), (0, 4), (3, 4)) == Region(4, (3, 4), (8, 1))
    held, need = Region.box((4, 4), (0, 2), (4, 2)), Region.span(0, 8)
    both = Region(2, (2, 2), (4, 1))
    assert held.intersect(need) == (both,)
    assert held.locate(both) == (Region(0, (4,), (1,)),)
    assert need.locate(both) == (both,)
    expert = Region.box((3, 2, 4), (1, 0, 0), (1, 2, 4))
    assert expert.coalesce() == Region.span(8, 8)
    assert expert.select(Region.box((2, 4), (0, 0), (2, 2))) == (Region(8, (2, 2), (4, 1)),)
