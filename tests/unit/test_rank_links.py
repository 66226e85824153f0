"""What trainer ranks post for each other: who gets it, who is missing, late or gone, and what a close leaves behind."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import pytest
from torch._C._distributed_c10d import HashStore

from wsync import other_rank, wire
from wsync.deadline import Deadline
from wsync.errors import ProtocolError
from wsync.other_rank import OtherRank
from wsync.rank_links import DOOR, MAX_MESSAGE_BYTES, Ends, RankLinks
from wsync.rank_zero import RankZero
from wsync.transports.listener import new_ticket

PATIENCE_S = 20.0
FIRST = (1, 0)


class World:
    """Ranks of this process, which meet in a store."""

    def __init__(self, size: int, stack: ExitStack) -> None:
        self.store = HashStore()
        self.zero = RankZero(size)
        self.others = [OtherRank(rank, size) for rank in range(1, size)]
        for links in self.all():
            stack.callback(links.close)

    def all(self) -> Sequence[RankLinks]:
        return [self.zero, *self.others]

    def start(self) -> None:
        for links in self.all():
            links.start(self.store)


Make = Callable[[int], World]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda size: World(size, stack)


def until(links: RankLinks, done: Callable[[], bool]) -> None:
    patience = Deadline.after(PATIENCE_S)
    while not links.wait(done, 0.01, known=9):  # not everything that is looked at here wakes those who wait
        patience.remaining("what was to happen")


def heard(links: RankLinks, at: tuple[int, int] = FIRST) -> Sequence[bytes]:
    until(links, lambda: links.take(at) is not None)
    messages = links.take(at)
    assert messages is not None
    return messages


def met(world: World) -> None:
    until(world.zero, lambda: len(world.zero.links) == len(world.others))


@pytest.mark.parametrize("nbytes", [3, 700 << 10, 3 << 20])
def test_everybody_gets_what_all_have_posted(make: Make, nbytes: int) -> None:
    world = make(3)
    world.start()
    messages = [bytes([rank]) * nbytes for rank in range(3)]
    for at in ((0, 0), (1, 0), (1, 1), (2, 0)):
        for links, message in zip(world.all(), messages, strict=True):
            links.post(at, message)
        assert [heard(links, at) for links in world.all()] == [messages] * 3


def test_what_is_posted_before_rank_0_is_there_gets_through(make: Make) -> None:
    world = make(2)
    [other] = world.others
    other.start(world.store)
    other.post(FIRST, b"early")
    assert not other.delivered()
    world.zero.start(world.store)
    world.zero.post(FIRST, b"late")
    assert heard(other) == heard(world.zero) == [b"late", b"early"]
    assert other.delivered()


def test_rank_0_says_who_is_missing(make: Make) -> None:
    world = make(4)
    world.start()
    met(world)
    first, second, third = world.others
    first.post(FIRST, b"")
    third.post(FIRST, b"")
    until(world.zero, lambda: list(world.zero.missing(FIRST)) == [0, 2])
    assert first.missing(FIRST) == second.missing(FIRST) == [0, 2]
    second.post(FIRST, b"")
    world.zero.post(FIRST, b"")
    heard(first)
    assert first.missing(FIRST) == world.zero.missing(FIRST) == []


def test_rank_0_that_does_not_answer_is_missing_itself(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_rank, "_ASK_S", 0.1)
    world = make(2)
    [other] = world.others
    other.start(world.store)
    assert other.missing(FIRST) == [0]


def test_a_call_that_was_given_over_is_late_for_those_who_come_then(make: Make) -> None:
    world = make(3)
    world.start()
    met(world)
    first, second = world.others
    world.zero.post(FIRST, b"")
    second.post(FIRST, b"")
    second.give_over(1)
    until(first, lambda: first.over == 1)
    first.post(FIRST, b"")
    until(first, lambda: first.late(FIRST))
    assert not second.late(FIRST), "it had come in time"
    for links in world.all():
        links.post((2, 0), b"")
    assert [len(heard(links, (2, 0))) for links in world.all()] == [3] * 3


def test_who_comes_after_the_end_of_a_call_is_told(make: Make) -> None:
    world = make(2)
    [other] = world.others
    world.zero.start(world.store)
    world.zero.give_over(3)
    other.start(world.store)
    until(other, lambda: other.over == 3)
    world.zero.post((3, 0), b"")
    assert world.zero.late((3, 0)), "rank 0 comes late, too"


def test_what_is_said_again_is_told_once(make: Make) -> None:
    world = make(3)
    world.start()
    first, second = world.others
    for _ in range(2):
        first.post(FIRST, b"one")
    for _ in range(2):
        world.zero.post(FIRST, b"zero")
    second.post(FIRST, b"two")
    for links in world.all():
        assert heard(links) == [b"zero", b"one", b"two"]
        links.post(FIRST, b"again")
    for links in world.all():
        links.post((1, 1), b"")
    assert [list(heard(links, (1, 1))) for links in world.all()] == [[b""] * 3] * 3


def vanish(links: Ends) -> None:
    """As the end of its process would."""
    for link in list(links.links.values()):
        link._sock.shutdown(socket.SHUT_RDWR)


def test_a_death_is_heard_by_all(make: Make) -> None:
    world = make(3)
    world.start()
    met(world)
    first, second = world.others
    until(first, lambda: 0 in first.links)
    until(second, lambda: 0 in second.links)
    first.closed = True  # it takes no notice of what it does to itself
    vanish(first)
    until(world.zero, lambda: world.zero.lost == [1])
    until(second, lambda: second.lost == [1])
    assert second.missing(FIRST) == [0, 1, 2]


def test_who_comes_after_a_death_hears_of_it(make: Make) -> None:
    world = make(3)
    first, second = world.others
    world.zero.start(world.store)
    first.start(world.store)
    until(first, lambda: 0 in first.links)
    first.closed = True
    vanish(first)
    until(world.zero, lambda: world.zero.lost == [1])
    second.start(world.store)
    until(second, lambda: second.lost == [1])


def test_a_close_is_no_death(make: Make) -> None:
    world = make(3)
    world.start()
    met(world)
    first, second = world.others
    first.close()
    until(world.zero, lambda: 1 not in world.zero.links)
    second.post(FIRST, b"")
    until(world.zero, lambda: list(world.zero.missing(FIRST)) == [0, 1])
    world.zero.close()
    until(second, lambda: not second.links)
    assert world.zero.lost == second.lost == []


def test_a_rank_0_that_failed_and_closed_is_still_heard(make: Make) -> None:
    """Also by those who have not even come yet."""
    world = make(3)
    first, second = world.others
    world.zero.start(world.store)
    first.start(world.store)
    until(first, lambda: 0 in first.links)
    world.zero.post(FIRST, b"no engine")
    world.zero.close()
    first.post(FIRST, b"")
    second.start(world.store)
    second.post(FIRST, b"")
    assert heard(first) == heard(second) == [b"no engine", b"", b""]
    until(second, lambda: not second.links)
    assert first.lost == second.lost == []


def test_a_rank_that_closes_before_it_has_met_rank_0_still_says_why(make: Make) -> None:
    world = make(2)
    [other] = world.others
    other.start(world.store)
    other.post(FIRST, b"no shard")
    other.close()
    world.zero.start(world.store)
    world.zero.post(FIRST, b"")
    assert heard(world.zero) == [b"", b"no shard"]
    until(world.zero, lambda: not world.zero.links)
    assert world.zero.lost == []


def test_a_message_that_fits_no_frame_is_refused(make: Make) -> None:
    world = make(2)
    for links in world.all():
        with pytest.raises(ProtocolError, match="longer than the bound"):
            links.post(FIRST, bytes(MAX_MESSAGE_BYTES + 1))


def nobody_there(store: HashStore) -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        host, port = sock.getsockname()
    store.set(DOOR, wire.pack(new_ticket("ranks", f"{host}:{port}", 0)))  # type: ignore[arg-type]
    return "trainer rank 0"


def something_else(store: HashStore) -> str:
    store.set(DOOR, wire.pack(["a list"]))  # type: ignore[arg-type]
    return "something else where trainer rank 0 tells its address"


@pytest.mark.parametrize("spoil", [nobody_there, something_else])
def test_a_rank_0_that_cannot_be_reached_is_trouble_at_once(make: Make, spoil: Callable[[HashStore], str]) -> None:
    world = make(2)
    [other] = world.others
    words = spoil(world.store)
    other.start(world.store)
    until(other, lambda: bool(other.trouble))
    assert words in other.trouble
    assert other.settled(FIRST)
    assert other.delivered(), "whoever reports a failure would wait for rank 0"
