"""Trainer ranks that send buckets in turn, over gloo, to an engine that one of them owns."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import wsync
from tests.distributed.test_sync_ranks import (
    PROMPTS,
    check_engine,
    full_state,
    launched_on_rank_zero,
    llama,
    optimizer_step,
    sharded,
)
from wsync import api
from wsync.adapters.engines.hf import HFEngine
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.deadline import Deadline
from wsync.testing.ranks import Rank, run_ranks
from wsync.transports.collective_sender import CollectiveSender

CONFIG = wsync.SyncConfig(bucket_bytes=32 << 10, timeout_s=20.0, transport="gloo", verify="digest", senders=2)


class Sent:
    """Buckets that this rank has sent."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.indexes: list[int] = []
        commit = CollectiveSender.commit

        def counted(sender: CollectiveSender, bucket: wsync.Bucket) -> None:
            self.indexes.append(bucket.index)
            commit(sender, bucket)

        patch.setattr(CollectiveSender, "commit", counted)


def three_syncs(me: Rank, kind: str, senders: int, num_slots: int) -> tuple[list[int], str]:
    """What this rank sent in the last of them, and what was agreed on."""
    actor: nn.Module = sharded(1) if kind == "fsdp2" else llama(1)
    config = replace(CONFIG, senders=senders, num_slots=num_slots)
    with launched_on_rank_zero(me) as engine, wsync.connect(actor, engine, config=config) as session:
        for turn in (1, 2, 3):
            if kind == "fsdp2":
                optimizer_step(actor)
            else:
                with torch.no_grad():
                    actor.get_parameter("model.norm.weight").add_(turn)
            with pytest.MonkeyPatch.context() as patch:
                sent = Sent(patch)
                assert session.sync().version == turn
            expected = full_state(actor)
            if engine is not None:
                check_engine(engine, expected)
        assert session.slot_bytes == 0
        session.release_slots()
        assert (session.slot_bytes > 0) == (me.rank < senders)
        session.sync()
        if engine is not None:
            check_engine(engine, expected)
        return sent.indexes, session.explain()


@pytest.mark.parametrize(("kind", "senders", "num_slots"), [("fsdp2", 2, 2), ("fsdp2", 3, 1), ("plain", 3, 2)])
def test_each_sends_its_turns(kind: str, senders: int, num_slots: int) -> None:
    results = run_ranks(three_syncs, 3, kind, senders, num_slots, timeout_s=120)
    sent = [indexes for indexes, _ in results]
    everything = sorted(chain.from_iterable(sent))
    assert everything == list(range(len(everything)))
    assert all(index % senders == rank for rank, indexes in enumerate(sent) for index in indexes)
    assert all(bool(indexes) == (rank < senders) for rank, indexes in enumerate(sent))
    assert all(f"senders, in turn: ranks {list(range(senders))}" in words for _, words in results)


def fewer_buckets_than_senders(me: Rank) -> bool:
    actor, config = sharded(1), replace(CONFIG, bucket_bytes=1 << 20, senders=3)
    with launched_on_rank_zero(me) as engine:
        wsync.sync(actor, engine, config=config)
        expected = full_state(actor)
        if engine is not None:
            check_engine(engine, expected)
    return True


def test_ranks_without_a_turn_send_nothing() -> None:
    assert all(run_ranks(fewer_buckets_than_senders, 3, timeout_s=120))


def a_sender_dies(me: Rank) -> str:
    """Rank 1, which owns no engine, is killed with its second bucket committed; rank 0 hears of it in time."""
    actor = sharded(1)
    words = ""
    with launched_on_rank_zero(me) as engine:
        wsync.sync(actor, engine, config=CONFIG)
        if me.rank == 1:
            commit = CollectiveSender.commit

            def die(sender: CollectiveSender, bucket: wsync.Bucket) -> None:
                commit(sender, bucket)
                if bucket.index == 3:
                    os.kill(os.getpid(), signal.SIGKILL)

            CollectiveSender.commit = die  # type: ignore[method-assign,assignment]
        optimizer_step(actor)
        with pytest.raises(wsync.WsyncError) as caught:
            wsync.sync(actor, engine, config=CONFIG)
        words = f"{caught.type.__name__}: {caught.value}"
        if engine is not None:
            with pytest.raises(wsync.EngineStateError, match="refuses to serve"):
                engine.generate(PROMPTS, max_new_tokens=2)
    return words


def test_the_death_of_a_sender_is_heard_and_nothing_is_mixed() -> None:
    words, _ = run_ranks(a_sender_dies, 2, timeout_s=120, expected_dead={1})
    assert words.startswith("RankError: trainer rank(s) [1] died")


def a_sender_fails_by_itself(me: Rank) -> str:
    """Rank 1 has no room, with a bucket of its own not sent; rank 0 first hears from the worker that it is gone."""
    actor, words = sharded(1), ""
    with launched_on_rank_zero(me) as engine, pytest.MonkeyPatch.context() as patch:
        wsync.sync(actor, engine, config=CONFIG)
        optimizer_step(actor)
        acquire, commit, stage = CollectiveSender.acquire, CollectiveSender.commit, ShardedProducer.stage

        def acquire_last(sender: CollectiveSender, deadline: Deadline) -> torch.Tensor:
            if sender._end.ring.published == 2 + before:
                with sender._end.changed:
                    assert sender._end.changed.wait_for(lambda: sender._end.receivers.lost, 20)
            return acquire(sender, deadline)

        def keep_one(sender: CollectiveSender, bucket: wsync.Bucket) -> None:
            if bucket.index != 3:
                commit(sender, bucket)

        def no_room(self: ShardedProducer, bucket: wsync.Bucket, slot: torch.Tensor | None) -> None:
            if bucket.index == 4:
                raise MemoryError("no room to pack bucket 4")
            stage(self, bucket, slot)

        if me.rank:
            patch.setattr(CollectiveSender, "commit", keep_one)
            patch.setattr(ShardedProducer, "stage", no_room)
        else:
            [session] = api._sessions.values()
            before = session._lines[0].sender._end.ring.published  # type: ignore[attr-defined]
            patch.setattr(CollectiveSender, "acquire", acquire_last)
        with pytest.raises((wsync.WsyncError, MemoryError)) as caught:
            wsync.sync(actor, engine, config=CONFIG)
        words = f"{caught.type.__name__}: {caught.value}"
        patch.undo()
        wsync.sync(actor, engine, config=CONFIG)
        expected = full_state(actor)
        if engine is not None:
            check_engine(engine, expected)
    return words


def test_the_owner_says_why_another_sender_failed() -> None:
    owner, other = run_ranks(a_sender_fails_by_itself, 2, timeout_s=120)
    assert other == "MemoryError: no room to pack bucket 4"
    assert owner.startswith(
        "RankError: rank 1: MemoryError: no room to pack bucket 4; this rank heard of it as PeerError"
    )
    assert "sender of trainer rank 1" in owner


def refusals(me: Rank) -> Sequence[str]:
    """On every rank, before anything moves."""
    actor = llama(1)
    fully_shard(actor)
    said = []
    with launched_on_rank_zero(me) as engine:
        for config in (replace(CONFIG, senders=4), replace(CONFIG, transport="shm")):
            with pytest.raises(wsync.WsyncError) as caught:
                wsync.connect(actor, engine, config=config)
            said.append(f"{caught.type.__name__}: {caught.value}")
    model = llama(2)
    with pytest.raises(wsync.WsyncError) as caught:
        wsync.connect(actor, HFEngine(model), config=CONFIG)
    said.append(f"{caught.type.__name__}: {caught.value}")
    dist.barrier()
    return said


def test_what_cannot_be_is_refused() -> None:
    for many, shm, owners in run_ranks(refusals, 2, timeout_s=120):
        assert many.startswith("ConfigError: senders is 4, of 2 trainer rank(s)")
        assert "shm has one sender" in shm
        assert "with engines on rank(s) [0, 1]" in owners


def test_what_a_config_refuses() -> None:
    with pytest.raises(wsync.ConfigError, match="senders is 0"):
        wsync.SyncConfig(senders=0)
    with pytest.raises(wsync.ConfigError, match="path='pull'"):
        wsync.SyncConfig(senders=2, path="pull")
