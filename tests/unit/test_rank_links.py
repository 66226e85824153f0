"""What trainer ranks post for each other: who gets it, who is missing, late or gone, and what a close leaves behind."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import HashStore

from wsync import other_rank, rank_zero
from wsync.deadline import Deadline
from wsync.errors import ProtocolError
from wsync.mailbox import Mailbox
from wsync.other_rank import OtherRank
from wsync.rank_links import DOOR, MAX_MESSAGE_BYTES, RankLinks
from wsync.rank_zero import RankZero, _own_host
from wsync.transports.listener import new_ticket

PATIENCE_S = 20.0
FIRST = (1, 0)


class World:
    """Ranks of this process, which meet in a store."""

    def __init__(self, size: int, stack: ExitStack) -> None:
        self.mailbox = Mailbox(HashStore())
        self.zero = RankZero(size, None)
        self.others = [OtherRank(rank, size, None) for rank in range(1, size)]
        for links in self.all():
            stack.callback(links.close)

    def all(self) -> Sequence[RankLinks]:
        return [self.zero, *self.others]

    def start(self) -> None:
        for links in self.all():
            links.start(self.mailbox)


Make = Callable[[int], World]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        yield lambda size: World(size, stack)


def until(links: RankLinks, done: Callable[[], bool]) -> None:
    patience = Deadline.after(PATIENCE_S)
    while not links.wait_for(done, 0.01):  # not everything that is looked at here wakes those who wait
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
    other.start(world.mailbox)
    other.post(FIRST, b"early")
    assert other.unmet == [0]
    world.zero.start(world.mailbox)
    world.zero.post(FIRST, b"late")
    assert heard(other) == heard(world.zero) == [b"late", b"early"]
    assert other.unmet == world.zero.unmet == []


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
    other.start(world.mailbox)
    assert other.missing(FIRST) == [0], "it is not there"
    world.start()
    until(other, lambda: 0 in other.links)
    monkeypatch.setattr(world.zero, "heard", lambda rank, frame: None)
    assert other.missing(FIRST) == [0], "it says nothing"


def test_a_call_that_was_given_over_is_late_for_those_who_come_then(make: Make) -> None:
    world = make(3)
    world.start()
    met(world)
    first, second = world.others
    world.zero.post(FIRST, b"")
    second.post(FIRST, b"")
    second.give_over(1, [1])
    until(world.zero, lambda: list(world.zero.absent(FIRST)) == [1])
    assert world.zero.settled(FIRST), "nobody waits for a call that is over"
    until(first, lambda: first.over == 1)
    assert first.late(FIRST), "it is not to wait for itself"
    assert not first.absent(FIRST)
    assert not second.late(FIRST), "it had come in time"
    for links in world.all():
        links.post((2, 0), b"")
    assert [len(heard(links, (2, 0))) for links in world.all()] == [3] * 3


def test_who_comes_after_the_end_of_a_call_is_told(make: Make) -> None:
    world = make(2)
    [other] = world.others
    world.zero.start(world.mailbox)
    world.zero.give_over(3, [1])
    other.start(world.mailbox)
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


def vanish(links: RankLinks) -> None:
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
    world.zero.start(world.mailbox)
    first.start(world.mailbox)
    until(first, lambda: 0 in first.links)
    first.closed = True
    vanish(first)
    until(world.zero, lambda: world.zero.lost == [1])
    second.start(world.mailbox)
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
    until(second, lambda: second.left == [1])
    world.zero.close()
    until(second, lambda: second.settled(FIRST))
    assert "closed its session" in str(second.trouble)
    assert second.missing(FIRST) == []
    assert world.zero.lost == second.lost == []


def test_a_death_and_a_close_wake_whoever_waits(make: Make) -> None:
    world = make(4)
    world.start()
    met(world)
    first, second, third = world.others
    for links in (first, third):
        until(links, lambda links=links: 0 in links.links)  # type: ignore[misc]
    first.close()
    assert third.wait_for(lambda: third.gone == {1}, PATIENCE_S)
    second.closed = True
    vanish(second)
    assert third.wait_for(lambda: third.gone == {1, 2}, PATIENCE_S)
    assert world.zero.wait_for(lambda: world.zero.gone == {1, 2}, PATIENCE_S)
    assert not third.settled(FIRST)


def test_a_message_that_fits_no_frame_is_refused(make: Make) -> None:
    world = make(2)
    for links in world.all():
        with pytest.raises(ProtocolError, match="longer than the bound"):
            links.post(FIRST, bytes(MAX_MESSAGE_BYTES + 1))


def test_a_door_that_is_shut_is_tried_again(make: Make) -> None:
    world = make(2)
    [other] = world.others
    with socket.create_server(("127.0.0.1", 0)) as sock:
        host, port = sock.getsockname()
    world.mailbox.put(DOOR, new_ticket("ranks", f"{host}:{port}", 0))
    other.start(world.mailbox)
    until(other, lambda: "does not listen" in other.obstacle)
    assert not other.settled(FIRST)
    world.zero.start(world.mailbox)
    until(other, lambda: 0 in other.links)


def test_a_store_that_is_gone_is_trouble_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make(2)

    def gone(*args: object) -> None:
        raise RuntimeError("broken pipe")

    for use in ("get", "put"):
        monkeypatch.setattr(world.mailbox, use, gone)
    world.start()
    for links in world.all():
        until(links, lambda links=links: links.settled(FIRST))  # type: ignore[misc]
        assert "broken pipe" in str(links.trouble)


def test_more_guests_than_may_wait_unknown_are_let_in(make: Make) -> None:
    world = make(90)
    world.start()
    for links in world.all():
        links.post(FIRST, b"x")
    assert all(len(heard(links)) == 90 for links in world.all())


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("a-name-of-this-host", "0.0.0.0")],
)
def test_a_name_that_means_this_host_to_itself_only(host: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others look the name up for themselves, and so must find rank 0 at the address that they see."""
    found = socket.getaddrinfo("127.0.0.1", 1, type=socket.SOCK_DGRAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    store = SimpleNamespace(host=host, port=1)
    assert _own_host(store) == own  # type: ignore[arg-type]


def test_rank_0_at_every_address_is_met_at_the_store_s(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero, "_own_host", lambda store: "0.0.0.0")
    world = make(2)
    world.start()
    until(world.zero, lambda: not world.zero.unmet)
