"""The spawner itself: results by rank, every rank's traceback, ranks killed on purpose, and the deadline."""

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from wsync.testing.ranks import Rank, RanksFailed, run_ranks


def add_up(me: Rank, scale: int) -> int:
    total = torch.tensor(me.rank * scale)
    dist.all_reduce(total)
    return int(total)


def fail_on_one(me: Rank) -> None:
    if me.rank == 1:
        raise ValueError("the shard is gone")
    dist.barrier()


def die_on_one(me: Rank) -> int:
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def hang(me: Rank) -> None:
    threading.Event().wait()


def test_results_come_by_rank_and_ranks_can_talk() -> None:
    assert run_ranks(add_up, 3, 7, timeout_s=60) == [21, 21, 21]


def test_a_failure_shows_its_traceback_and_ends_the_others() -> None:
    with pytest.raises(RanksFailed, match=r"--- rank 1 of 2: Traceback[\s\S]*the shard is gone"):
        run_ranks(fail_on_one, 2, timeout_s=60)


def test_an_unexpected_death_is_named_and_an_expected_one_is_none() -> None:
    with pytest.raises(RanksFailed, match="rank 1 of 2: died without a word, exit code -9"):
        run_ranks(die_on_one, 2, timeout_s=60)
    survivor, killed = run_ranks(die_on_one, 2, timeout_s=60, expected_dead={1})
    assert survivor != os.getpid()
    assert killed is None


def test_a_rank_that_should_have_died_and_did_not_is_a_failure() -> None:
    with pytest.raises(RanksFailed, match="rank 0 of 1: returned, but was expected to die"):
        run_ranks(add_up, 1, 1, timeout_s=60, expected_dead={0})


def test_the_deadline_kills_what_hangs() -> None:
    with pytest.raises(RanksFailed, match="rank 0 of 1: did not end within 8 s"):
        run_ranks(hang, 1, timeout_s=8)
