"""Weights that workers pull out of real trainer ranks under every layout; what travels instead; and who dies when."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wsync
from tests.distributed.exchange_steps import Case, Outcome, run_cases
from tests.distributed.sharded_models import LAYOUTS, full_tensors, llama, move_shards, shard, train_step
from wsync.bench.receiver import BareEngine
from wsync.pull import host_reads
from wsync.testing.ranks import Rank, run_ranks
from wsync.transports.link import ready

PULL = wsync.SyncConfig(path="pull", timeout_s=20.0, bucket_bytes=16 << 10)
PROBE_BYTES = 64
ON_FOUR = ["hsdp", "fsdp2 over tp", "fsdp2 over tp uneven", "fsdp2"]
ON_TWO = [name for name in LAYOUTS if name not in ON_FOUR]


def receiver(model: nn.Module, dtype: torch.dtype) -> BareEngine:
    return BareEngine({name: torch.zeros_like(full, dtype=dtype) for name, full in full_tensors(model).items()})


def pulled(me: Rank, name: str) -> None:
    """Three syncs with steps between, into an engine on rank 0, in fp32, then into one on every rank, in bf16."""
    model = LAYOUTS[name]()
    for everywhere, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        made = receiver(model, dtype)
        engine = made if everywhere or me.rank == 0 else None
        with wsync.connect(model, engine, config=PULL) as session:
            assert "pulled: " in session.explain()
            for step in range(3):
                train_step(model, step)
                report = session.sync()
                expected = full_tensors(model)
                assert report.through_loader == 0
                if engine is not None:
                    wrong = [n for n, t in expected.items() if not torch.equal(engine.tensors[n], t.to(dtype))]
                    assert wrong == [], step
                    held = next(model.parameters()).element_size()
                    assert report.pulled_nbytes == sum(t.numel() for t in expected.values()) * held, "each element once"


def outcomes(run: Callable[..., Any], names: list[str], world_size: int) -> dict[str, list[Outcome]]:
    cases = [Case(name=name, run=run, args=(name,)) for name in names]
    by_rank = run_ranks(run_cases, world_size, cases, timeout_s=300)
    return {name: [mine[name] for mine in by_rank] for name in names}


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, list[Outcome]]:
    return outcomes(pulled, ON_TWO, 2)


@pytest.fixture(scope="module")
def four_ranks() -> dict[str, list[Outcome]]:
    return outcomes(pulled, ON_FOUR, 4)


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks(two_ranks: dict[str, list[Outcome]], name: str) -> None:
    assert [outcome.error for outcome in two_ranks[name]] == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks(four_ranks: dict[str, list[Outcome]], name: str) -> None:
    assert [outcome.error for outcome in four_ranks[name]] == [""] * 4


def storage_that_moved(me: Rank) -> None:
    model = shard(llama())
    made = receiver(model, torch.float32)
    engine = made if me.rank == 0 else None
    with wsync.connect(model, engine, config=PULL) as session:
        session.sync()
        move_shards(model)
        train_step(model, 1)
        session.sync()
        expected = full_tensors(model)
        assert engine is None or all(torch.equal(engine.tensors[n], t) for n, t in expected.items())


def bytes_by_rank(me: Rank) -> list[int]:
    """What rank 0's engine reads of each rank; HSDP has every half twice."""
    taken: dict[int, int] = {}
    healthy = host_reads._read_runs

    def count(pid: int, moves: Any) -> None:
        taken[pid] = taken.get(pid, 0) + sum(len(froms) * nbytes for froms, _, nbytes in moves)
        healthy(pid, moves)

    host_reads._read_runs = count
    model = LAYOUTS["hsdp"]()
    engine = receiver(model, torch.float32)
    try:
        wsync.sync(model, engine if me.rank == 0 else None, config=PULL)
    finally:
        host_reads._read_runs = healthy
    return sorted(taken.values())


def a_rank_is_killed(me: Rank) -> str:
    """SIGKILL of rank 1 when rank 0's engine has read a part of it."""
    model = shard(llama())
    engine = receiver(model, torch.float32)
    mine = engine if me.rank == 0 else None
    config = wsync.SyncConfig(path="pull", timeout_s=4.0)
    with wsync.connect(model, mine, config=config) as session:
        session.sync()
        healthy, killed = host_reads._read_runs, list[int]()

        def kill(pid: int, moves: Any) -> None:
            if pid != os.getpid() and not killed:
                killed.append(pid)
                half = [(froms, tos, nbytes // 2) for froms, tos, nbytes in moves if nbytes > 1]
                healthy(pid, half)
                pidfd = os.pidfd_open(pid)
                os.kill(pid, signal.SIGKILL)
                assert ready([pidfd], 20.0)
                os.close(pidfd)
            healthy(pid, moves)

        host_reads._read_runs = kill
        with pytest.raises(wsync.WsyncError) as caught:
            session.sync()
        assert mine is not None
        with pytest.raises(wsync.EngineStateError, match="no consistent version"):
            mine.version()
        return str(caught.value)


def an_engine_that_does_not_begin(me: Rank) -> None:
    """Nobody waits for the word of that rank before it: the others hear in their next round."""
    model = shard(llama())
    engine = receiver(model, torch.float32)
    with wsync.connect(model, engine if me.rank == 0 else None, config=PULL) as session:
        session.sync()
        train_step(model, 1)
        healthy = engine.begin

        def begin(*args: object, **kwargs: object) -> None:
            raise wsync.EngineStateError("it is away")

        engine.begin = begin  # type: ignore[method-assign]
        kind = wsync.EngineStateError if me.rank == 0 else wsync.RankError
        started = time.monotonic()
        with pytest.raises(kind, match="it is away"):
            session.sync()
        assert time.monotonic() - started < PULL.timeout_s / 2
        assert me.rank or engine.version() == 1
        engine.begin = healthy  # type: ignore[method-assign]
        session.sync()
        expected = full_tensors(model)
        assert me.rank or all(torch.equal(engine.tensors[n], t) for n, t in expected.items())


def test_an_engine_that_does_not_begin_is_heard_of_at_once() -> None:
    run_ranks(an_engine_that_does_not_begin, 2, timeout_s=120)


def test_storage_that_moved_is_found() -> None:
    run_ranks(storage_that_moved, 2, timeout_s=120)


def test_replicas_share_the_work() -> None:
    found = run_ranks(bytes_by_rank, 4, timeout_s=120)
    assert found[1:] == [[], [], []]
    nothing, one, other, own = (nbytes - PROBE_BYTES for nbytes in found[0])
    assert nothing == 0, "who has the same half as the reader is not asked"
    assert 0.45 * own < one <= other < 0.55 * own, "the other half comes from both that have it"


def test_a_rank_that_dies_while_it_is_read_leaves_the_engine_torn() -> None:
    words, _ = run_ranks(a_rank_is_killed, 2, timeout_s=120, expected_dead=[1])
    assert "is gone" in words or "died" in words


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(wsync.ConfigError, match="verify compares what arrives in buckets"):
        wsync.SyncConfig(path="pull", verify="digest")
    with pytest.raises(wsync.ConfigError, match="path is 'push'; choose one of auto, buckets, pull"):
        wsync.SyncConfig(path="push")  # type: ignore[arg-type]
