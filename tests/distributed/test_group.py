"""Rounds and data between real ranks: who is named when a rank fails, strays, dies or never comes."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from wsync.deadline import Deadline
from wsync.errors import ProtocolError, RankError, SyncTimeout, TransportError
from wsync.group import Group
from wsync.rank_links import MAX_MESSAGE_BYTES
from wsync.testing.ranks import Rank, run_ranks


def group_of(me: Rank, timeout_s: float = 20.0) -> Group:
    group = Group(me.rank, me.world_size, PrefixStore("session", me.store), timeout_s)
    group.enter()
    return group


def trainer_group_works(me: Rank) -> bool:
    total = torch.tensor(1)
    dist.all_reduce(total)
    return int(total) == me.world_size


def exchange_small_and_large(me: Rank) -> bool:
    group = group_of(me)
    deadline = Deadline.after(20)
    assert group.round("sizes", me.rank * 10, deadline) == [rank * 10 for rank in range(me.world_size)]
    before = me.store.num_keys()
    replies = group.round("large", bytes([me.rank]) * (9 << 20), deadline)
    assert replies == [bytes([rank]) * (9 << 20) for rank in range(me.world_size)]
    return me.store.num_keys() == before


def fail_on_rank_one(me: Rank) -> tuple[str, bool]:
    group = group_of(me)

    def make() -> int:
        if me.rank == 1:
            raise ValueError("the shard is gone")
        return 1

    try:
        group.gather("pack", make, Deadline.after(20))
    except RankError as error:
        words = f"{error.ranks} {error}"
    except ValueError as error:
        words = str(error)
    return words, trainer_group_works(me)


def stray(me: Rank) -> str:
    group = group_of(me)
    try:
        group.round("finish" if me.rank == 1 else "bucket 3", None, Deadline.after(20))
    except RankError as error:
        return str(error)
    return "agreed"


def never_come(me: Rank) -> tuple[str, bool]:
    words = "stayed away"
    if me.rank != 1:
        with pytest.raises(RankError) as caught:
            group_of(me).round("begin", None, Deadline.after(1.0))
        words = f"{caught.value.ranks} {caught.value}"
    return words, trainer_group_works(me)


def come_late(me: Rank) -> list[int]:
    """Rank 1 misses the first call, which rank 0 gives up; after that both meet, call after call."""
    group = Group(me.rank, me.world_size, PrefixStore("session", me.store), 20.0)
    if me.rank == 0:
        group.enter()
        with pytest.raises(RankError):
            group.round("begin", None, Deadline.after(0.5))
    dist.barrier()
    numbers = []
    for _ in range(2):
        group.enter()
        assert group.round("begin", me.rank, Deadline.after(20)) == [0, 1]
        numbers.append(group.call)
    return numbers


def fail_first(me: Rank) -> str:
    """Rank 0 fails before its first message and goes on; a slower rank 1 hears why, and both meet in the next call."""
    group = Group(me.rank, me.world_size, PrefixStore("session", me.store), 20.0)
    words = ""
    if me.rank == 0:
        group.enter()
        group.report("begin", ValueError("no engine"))
    dist.barrier()
    if me.rank == 1:
        group.enter()
        with pytest.raises(RankError) as caught:
            group.round("begin", None, Deadline.after(5))
        words = str(caught.value)
    group.enter()
    assert group.round("begin", me.rank, Deadline.after(20)) == [0, 1]
    return words


def close_at_once(me: Rank) -> object:
    """Rank 0 closes right after a round; rank 1, held up in it, still reads what rank 0 had posted."""
    group = group_of(me)
    if me.rank == 0:
        replies = group.round("last", "bye", Deadline.after(20))
        group.close()
        me.store.set("closed", "")
        return replies
    post = group._post

    def post_and_wait(envelope: dict[str, object]) -> None:
        post(envelope)
        patience = Deadline.after(20)
        while not me.store.check(["closed"]):  # a wait would keep the store from whoever looks for rank 0 there
            patience.remaining("rank 0 to close")

    group._post = post_and_wait  # type: ignore[method-assign]
    return group.round("last", "hello", Deadline.after(20))


def send_to_first(me: Rank) -> bool:
    group = group_of(me)
    generator = torch.Generator().manual_seed(me.rank)
    mine = torch.rand(1 << 16, generator=generator)
    received = {rank: torch.empty_like(mine) for rank in range(1, me.world_size)} if me.rank == 0 else {}
    sends = [(0, mine)] if me.rank else []
    group.transfer(sends, list(received.items()), Deadline.after(20))
    for rank, tensor in received.items():
        assert torch.equal(tensor, torch.rand(1 << 16, generator=torch.Generator().manual_seed(rank)))
    return trainer_group_works(me)


def die_before_sending(me: Rank) -> str:
    group = group_of(me, timeout_s=5.0)
    first = torch.rand(1024)
    group.transfer([(0, first)] if me.rank else [], [] if me.rank else [(1, first)], Deadline.after(5))
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((TransportError, SyncTimeout)) as caught:
        group.transfer([], [(1, first)], Deadline.after(5))
    return str(caught.value)


def meet_when(me: Rank, key: str) -> None:
    patience = Deadline.after(20)
    while not me.store.check([key]):
        patience.remaining(key)


def words_of(group: Group, phase: str = "begin", timeout_s: float = 20.0) -> str:
    """What a round that cannot succeed raises, and that it did so long before its deadline."""
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        group.round(phase, None, Deadline.after(timeout_s))
    assert time.monotonic() - started < 10
    return f"{caught.value.ranks} {caught.value}"


def fail_and_die(me: Rank, culprit: int, met: bool) -> str:
    """The culprit reports a failure, and its process ends before any other rank has come (back)."""
    group = group_of(me)
    if met:
        group.round("connect", None, Deadline.after(20))
    if me.rank == culprit:
        group.report("begin", ValueError("no engine"))
        me.store.set("reported", "")
        os.kill(os.getpid(), signal.SIGKILL)
    meet_when(me, "reported")
    return words_of(group)


def killed_in_a_round(me: Rank) -> str:
    group = group_of(me)
    group.round("connect", None, Deadline.after(20))
    if me.rank == 0:
        meet_when(me, "waits")
        os.kill(os.getpid(), signal.SIGKILL)
    me.store.set("waits", "")
    return words_of(group)


def one_closes(me: Rank, culprit: int) -> str:
    group = group_of(me)
    group.round("connect", None, Deadline.after(20))
    words = "closed"
    if me.rank == culprit:
        group.close()
    else:
        words = words_of(group)
    dist.barrier()
    return words


def interrupted(me: Rank) -> str:
    """Rank 1 has posted its message, and fails before it has read those of the others."""
    group = group_of(me)
    if me.rank == 1:
        group._post({"phase": "begin", "message": None, "error": None})
        group.report("begin", MemoryError("no room"))
        dist.barrier()
        return "failed"
    group.round("begin", None, Deadline.after(20))
    words = words_of(group, "next")
    dist.barrier()
    return words


def one_message_is_too_long(me: Rank) -> str:
    group = group_of(me)
    group.round("connect", None, Deadline.after(20))
    if me.rank != 1:
        return words_of(group)
    with pytest.raises(ProtocolError, match="longer than the bound"):
        group.round("begin", bytes(MAX_MESSAGE_BYTES), Deadline.after(20))
    return "refused"


def test_rounds_carry_messages_of_any_size_and_leave_the_store_clean() -> None:
    assert all(run_ranks(exchange_small_and_large, 3, timeout_s=60))


def test_a_failure_is_heard_and_named_and_the_trainers_group_goes_on() -> None:
    (heard, fine), (own, fine_too), _ = run_ranks(fail_on_rank_one, 3, timeout_s=60)
    assert heard.startswith("(1,)")
    assert "rank 1: ValueError: the shard is gone" in heard
    assert own == "the shard is gone"
    assert fine
    assert fine_too


def test_ranks_in_different_phases_are_told_apart() -> None:
    first, second = run_ranks(stray, 2, timeout_s=60)
    assert "rank 0 is in phase 'bucket 3', others are in {1: 'finish'}" in first
    assert "rank 1 is in phase 'finish', others are in {0: 'bucket 3'}" in second


def test_a_rank_that_does_not_call_is_named_by_all_others() -> None:
    (first, _), _, (third, _) = run_ranks(never_come, 3, timeout_s=60)
    assert first.startswith("(1,) trainer rank(s) [1] did not reach phase 'begin'")
    assert third.startswith("(1,) trainer rank(s) [1] did not reach phase 'begin'")


def test_a_rank_that_missed_a_call_meets_the_others_in_the_next() -> None:
    assert run_ranks(come_late, 2, timeout_s=60) == [[2, 3], [2, 3]]


def test_a_rank_that_fails_before_the_first_round_is_heard_by_a_slower_one() -> None:
    _, words = run_ranks(fail_first, 2, timeout_s=60)
    assert words == "stopped before phase 'begin': rank 0: ValueError: no engine"


@pytest.mark.parametrize("met", [False, True], ids=["unmet", "met"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_is_heard_though_its_process_has_ended(culprit: int, met: bool) -> None:
    words = run_ranks(fail_and_die, 3, culprit, met, timeout_s=60, expected_dead={culprit})
    expected = f"({culprit},) stopped before phase 'begin': rank {culprit}: ValueError: no engine"
    assert [said for rank, said in enumerate(words) if rank != culprit] == [expected] * 2


def test_the_death_of_rank_0_ends_a_round_at_once() -> None:
    _, *words = run_ranks(killed_in_a_round, 3, timeout_s=60, expected_dead={0})
    assert all(said.startswith("(0,) trainer rank(s) [0] died before phase 'begin'") for said in words)


def test_a_rank_0_that_closes_ends_the_rounds_of_others_at_once() -> None:
    _, *words = run_ranks(one_closes, 3, 0, timeout_s=60)
    assert words == ["(0,) trainer rank 0 closed its session"] * 2


def test_a_rank_that_closes_is_named_at_once() -> None:
    first, _, third = run_ranks(one_closes, 3, 1, timeout_s=60)
    assert first == third == "(1,) trainer rank(s) [1] closed their session before phase 'begin'"


def test_a_failure_in_the_middle_of_a_round_is_heard_in_the_next() -> None:
    first, _, third = run_ranks(interrupted, 3, timeout_s=60)
    assert first == third == "(1,) stopped before phase 'next': rank 1: MemoryError: no room"


def test_a_message_that_is_too_long_is_heard_of_by_the_others() -> None:
    first, second, third = run_ranks(one_message_is_too_long, 3, timeout_s=60)
    assert second == "refused"
    for said in (first, third):
        assert said.startswith("(1,) stopped before phase 'begin': rank 1: ProtocolError: a message of")


def one_fails_before_it_sends(me: Rank) -> tuple[str, float]:
    """The second transfer, in which rank 0 waits for rank 1 until the deadline unless it hears of the failure."""
    group = group_of(me)
    for _ in range(2):
        group.transfer([(1 - me.rank, torch.ones(4))], [(1 - me.rank, torch.empty(4))], Deadline.after(20))
    began = time.monotonic()
    if me.rank == 1:
        group.report("fill", ValueError("no such tensor"))
        meet_when(me, "heard")
        return "failed", 0.0
    with pytest.raises(RankError) as caught:
        group.transfer([], [(1, torch.empty(4))], Deadline.after(40))
    me.store.set("heard", "")
    assert caught.value.ranks == (1,)
    return str(caught.value), time.monotonic() - began


def test_closing_leaves_the_last_messages_for_slower_ranks() -> None:
    assert run_ranks(close_at_once, 2, timeout_s=60) == [["bye", "hello"]] * 2


def test_point_to_point_brings_the_right_bytes() -> None:
    assert all(run_ranks(send_to_first, 3, timeout_s=60))


def test_a_dead_peer_ends_the_transfer_within_the_deadline() -> None:
    words, _ = run_ranks(die_before_sending, 2, timeout_s=60, expected_dead={1})
    assert "rank" in words


def test_a_rank_that_fails_and_lives_ends_a_transfer_that_waits_for_it() -> None:
    (words, seconds), _ = run_ranks(one_fails_before_it_sends, 2, timeout_s=60)
    assert words == "stopped in the middle of a transfer: rank 1: ValueError: no such tensor"
    assert seconds < 20, "the deadline is 40 s"
