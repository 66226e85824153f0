"""A trainer world and an engine world, started apart: same bits and tokens, and how each hears that the other died."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import _world

import wsync
from tests.distributed.worlds import (
    BUCKET_BYTES,
    bytes_of_weights,
    optimizer_step,
    remote,
    serve_llama,
    sharded,
    timed_error,
    tokens_of,
)
from tests.engines.vllm_runner import run_program
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.background import Background
from wsync.deadline import Deadline
from wsync.testing.actors import Actor
from wsync.testing.ranks import LOOPBACK, Rank, run_ranks

TIMEOUT_S = 120.0
PROGRAM = "tests.distributed.worlds_program"
ROLES = ("engines", "trainer")
AT_ONCE_S = 2.0
"""Far below every deadline in these tests."""


def settings(transport: str) -> wsync.SyncConfig:
    return wsync.SyncConfig(bucket_bytes=BUCKET_BYTES, transport=transport, timeout_s=30.0, verify="digest")


@contextmanager
def engines(count: int, address: str = "127.0.0.1:0") -> Iterator[tuple[list[Actor], list[str]]]:
    """Engine processes, each with a model of its own at an address of its own."""
    with ExitStack() as stack:
        actors = [
            stack.enter_context(Actor(True, TIMEOUT_S, serve_llama, 100 + seed, address)) for seed in range(count)
        ]
        yield actors, [actor.hear("address") for actor in actors]


def look(actor: Actor) -> tuple[object, dict[str, bytes], object]:
    actor.tell("look")
    state: tuple[object, dict[str, bytes], object] = actor.hear("state")
    return state


def trainer_group_works() -> bool:
    total = torch.tensor(1)
    dist.all_reduce(total)
    return int(total) == dist.get_world_size()


def three_syncs(me: Rank, addresses: Sequence[str], transport: str, spread: bool) -> tuple[dict[str, bytes], str]:
    """Rank 0 owns all engines, or each rank one."""
    actor = sharded(1)
    mine = addresses[me.rank : me.rank + 1] if spread else addresses[: len(addresses) * (1 - me.rank)]
    known = list(_world.pg_map)
    passed = remote(mine) or None
    for turn in (1, 2, 3):
        optimizer_step(actor)
        report = wsync.sync(actor, passed, config=settings(transport))
        assert report.version == turn
    assert list(_world.pg_map) == known, "a group was registered with torch.distributed"
    assert trainer_group_works()
    return bytes_of_weights(actor), report.transport


@pytest.mark.parametrize(
    ("transport", "spread"), [("gloo", False), ("shm", False), pytest.param("gloo", True, marks=pytest.mark.slow)]
)
def test_three_syncs_are_equal_in_bits_and_tokens(transport: str, spread: bool) -> None:
    with engines(2) as (actors, addresses):
        (weights, used), _ = run_ranks(three_syncs, 2, addresses, transport, spread, timeout_s=TIMEOUT_S)
        assert used == transport
        expected = tokens_of(weights)
        for actor in actors:
            version, held, tokens = look(actor)
            assert version == 3
            assert held == weights
            assert tokens == expected


@pytest.mark.slow
def test_two_torchrun_worlds(tmp_path: Path) -> None:
    """Launched apart, each with its own agent, store and default group."""
    listener = socket.create_server((LOOPBACK, 0))
    port = int(listener.getsockname()[1])
    patience = timedelta(seconds=200)
    board = TCPStore(LOOPBACK, port, None, True, patience, False, master_listen_fd=listener.detach())
    worlds = [
        Background(role, partial(run_program, PROGRAM, [role, tmp_path, port], tmp_path / f"{role}.txt", ranks=2))
        for role in ROLES
    ]
    for world in worlds:
        world.result(Deadline.after(400))
    del board
    found = {(role, rank): json.loads((tmp_path / f"{role} {rank}").read_text()) for role in ROLES for rank in range(2)}
    first = found["trainer", 0]
    assert first[-1] == 2
    assert len({str(tokens) for tokens in first[:3]}) > 1, "three sets of weights gave the same tokens"
    assert all(each == first for each in found.values())


@contextmanager
def at_bucket(index: int, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on this rank when it stages bucket `index`."""
    healthy = ShardedProducer.stage

    def stage(self: ShardedProducer, bucket: wsync.Bucket, slot: torch.Tensor | None) -> None:
        if bucket.index == index:
            act()
        healthy(self, bucket, slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedProducer, "stage", stage)
        yield


def engine_is_killed(me: Rank, addresses: Sequence[str], pid: int, transport: str) -> tuple[str, float]:
    """SIGKILL of the engine's process by rank 1, at bucket 2. Returns what this rank heard, and after how long."""
    actor = sharded(1)
    passed = remote(addresses) if me.rank == 0 else None
    wsync.sync(actor, passed, config=settings(transport))

    def kill() -> None:
        me.store.set("died", str(time.monotonic()))
        os.kill(pid, signal.SIGKILL)

    with at_bucket(2, kill if me.rank == 1 else lambda: None):
        heard = timed_error(
            lambda: wsync.sync(actor, passed, config=settings(transport)), lambda: float(me.store.get("died"))
        )
    assert trainer_group_works()
    return heard


@pytest.mark.parametrize("transport", ["gloo", pytest.param("shm", marks=pytest.mark.slow)])
def test_a_killed_engine_is_heard_at_once_and_its_successor_is_synced(transport: str) -> None:
    with engines(1) as ((actor,), addresses):
        owner, other = run_ranks(engine_is_killed, 2, addresses, actor.pid, transport, timeout_s=TIMEOUT_S)
    assert owner[0].startswith("PeerError"), owner
    assert other[0].startswith("RankError"), other
    assert "rank 0" in other[0]
    assert max(owner[1], other[1]) < AT_ONCE_S
    with engines(1, addresses[0]) as ((actor,), again):
        assert again == addresses
        (weights, _), _ = run_ranks(three_syncs, 2, again, transport, False, timeout_s=TIMEOUT_S)
        assert look(actor)[1] == weights


def rank_is_killed(me: Rank, addresses: Sequence[str], transport: str, victim: int, bucket: int) -> tuple[str, float]:
    """SIGKILL of trainer rank `victim` at that bucket; -1: between two syncs."""
    actor = sharded(1)
    passed = remote(addresses) if me.rank == 0 else None
    wsync.sync(actor, passed, config=settings(transport))

    def die() -> None:
        me.store.set("died", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if me.rank == victim and bucket < 0:
        die()
    with at_bucket(bucket, die if me.rank == victim else lambda: None):
        return timed_error(
            lambda: wsync.sync(actor, passed, config=settings(transport)), lambda: float(me.store.get("died"))
        )


@pytest.mark.parametrize("transport", ["gloo", pytest.param("shm", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("victim", "bucket"), [(0, 2), (1, 2), (1, -1)])
def test_a_killed_trainer_rank_is_heard_at_once_and_the_next_trainer_heals(
    transport: str, victim: int, bucket: int
) -> None:
    with engines(1) as ((actor,), addresses):
        heard = run_ranks(
            rank_is_killed, 2, addresses, transport, victim, bucket, timeout_s=TIMEOUT_S, expected_dead={victim}
        )
        words, seconds = heard[1 - victim]
        assert words.startswith(f"RankError: trainer rank(s) [{victim}] died"), words
        assert seconds < AT_ONCE_S
        version, _, tokens = look(actor)
        if bucket < 0:
            assert version == 1
        else:
            assert str(version).startswith("EngineStateError"), "a torn engine says that it serves a version"
            assert str(tokens).startswith("EngineStateError")
        weights = run_ranks(one_sync, 2, addresses, transport, timeout_s=TIMEOUT_S)[0]
        version, held, tokens = look(actor)
        assert (version, held, tokens) == (2, weights, tokens_of(weights))


def one_sync(me: Rank, addresses: Sequence[str], transport: str) -> dict[str, bytes]:
    actor = sharded(2)
    assert wsync.sync(actor, remote(addresses) if me.rank == 0 else None, config=settings(transport)).version == 2
    return bytes_of_weights(actor)
