"""Rounds of real ranks of which one gives up, is stopped, or is only slower: who waits, who is named, what stays."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from tests.distributed.test_group import group_of, meet_when, words_of
from wsync.deadline import Deadline
from wsync.errors import RankError
from wsync.group import Group
from wsync.testing.ranks import Rank, run_ranks


def fail_in_many_ways(me: Rank) -> tuple[int, int]:
    """Keys that four calls have left in the store which each failed in another way, before and after one that did not.

    One fails before it has met anybody, one stays away, one fails in the middle, all fail at once.
    """
    group = Group(me.rank, me.world_size, PrefixStore("session", me.store), 20.0)
    first = me.rank == 1

    def call(mine: BaseException | None, timeout_s: float = 20.0) -> None:
        with pytest.raises((RankError, ValueError)):
            group.agree("begin", mine, Deadline.after(timeout_s))

    group.enter()
    call(ValueError("at the door") if first else None)
    if not first:
        group.enter()
        call(None, 1.0)
    dist.barrier()
    group.enter()
    group.round("begin", None, Deadline.after(20))
    dist.barrier()
    clean = me.store.num_keys()
    dist.barrier()
    call(ValueError("in the middle") if first else None)
    group.enter()
    call(ValueError("everybody"))
    dist.barrier()
    before = me.store.num_keys()
    group.enter()
    group.round("begin", None, Deadline.after(20))
    dist.barrier()
    return before - clean, me.store.num_keys() - clean


def one_closes_as_another_is_slow(me: Rank) -> str:
    """Rank 1 has closed. Rank 2 has not posted, and has said already whom it blames."""
    group = group_of(me)
    group.round("connect", None, Deadline.after(20))
    words = ""
    if me.rank == 1:
        group.close()
    elif me.rank == 2:
        group._letters().leave(group.call, "RankError: rank 1 closed", RankError("closed"))
        me.store.set("blamed", "")
    else:
        meet_when(me, "blamed")
        words = words_of(group)
    dist.barrier()
    return words


def give_up_and_close(me: Rank) -> str:
    """Rank 1 stays away. Rank 0 gives up first and closes; rank 2, which is more patient, has it from rank 0 then."""
    words = "stayed away"
    if me.rank != 1:
        group = group_of(me)
        group._links.start(group._letters().mailbox)
        patience, stays_away = Deadline.after(20), {1}
        while not stays_away.issuperset(group._links.unmet):
            patience.remaining("the other rank that comes")
        with pytest.raises(RankError) as caught:
            group.round("begin", None, Deadline.after(2.0 if me.rank == 0 else 20.0))
        words = f"{caught.value.ranks} {caught.value}"
        group.close()
    dist.barrier()
    return words


def wait_until_stopped(pid: int) -> None:
    patience = Deadline.after(20)
    while Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "T":
        patience.remaining("the other rank to stop")


def one_is_stopped(me: Rank, culprit: int) -> str:
    """The culprit stops in a round: what others say is more than its socket takes. It is woken by one of them then.

    Without rank 0 there is no round. Any other rank has said what it had to say, and the rest can do without it.
    """
    group, long, waker = group_of(me), bytes([me.rank]) * (24 << 20), 1 - culprit
    group.round("connect", None, Deadline.after(20))
    if me.rank == culprit:
        me.store.set("stopped", str(os.getpid()))
        if culprit:
            group._post({"phase": "begin", "message": None, "error": None})
        os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()
        return "woken"
    meet_when(me, "stopped")
    pid = int(me.store.get("stopped"))
    wait_until_stopped(pid)
    started, words = time.monotonic(), "went on"
    try:
        group.round("begin", long, Deadline.after(2))
    except RankError as error:
        words = f"{error.ranks} {error}"
    seconds = time.monotonic() - started
    if me.rank == waker:
        meet_when(me, "waited")
        os.kill(pid, signal.SIGCONT)
    else:
        me.store.set("waited", "")
    dist.barrier()
    assert seconds < 8, seconds
    return words


def test_words_about_calls_that_are_over_leave_the_store() -> None:
    for failed, then in run_ranks(fail_in_many_ways, 3, timeout_s=60):
        assert failed == (1 + 1) + (3 + 1), "of each call the letters, and that there are any"
        assert then == 0


def test_who_is_only_slower_is_not_named() -> None:
    words, *_ = run_ranks(one_closes_as_another_is_slow, 3, timeout_s=60)
    assert words == "(1,) trainer rank(s) [1] closed their session before phase 'begin'"


def test_who_gives_up_first_tells_the_others_who_is_missing() -> None:
    first, _, third = run_ranks(give_up_and_close, 3, timeout_s=60)
    assert first.startswith("(1,) trainer rank(s) [1] did not reach phase 'begin'")
    assert third.startswith("(1,) trainer rank(s) [1] did not reach phase 'begin'")


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_is_stopped_keeps_nobody_beyond_the_deadline(culprit: int) -> None:
    words = run_ranks(one_is_stopped, 3, culprit, timeout_s=60)
    assert words.pop(culprit) == "woken"
    if culprit:
        assert words == ["went on"] * 2
    else:
        assert all(said.startswith("(0,) trainer rank(s) [0] did not reach phase 'begin'") for said in words)
