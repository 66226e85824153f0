"""Control messages are counted, not timed: their number depends on buckets and workers, never on tensors."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import wsync
from wsync.adapters.engines.hf import HFEngine
from wsync.deadline import Deadline
from wsync.group import Group
from wsync.outbox import Outbox
from wsync.testing.ranks import Rank, run_ranks
from wsync.transports.link import Link

TOTAL_BYTES = 3000 << 10
FEW, MANY = 30, 3000
BUCKETS = 10


class Toy(nn.Module):
    """`TOTAL_BYTES` of random fp32 in `count` equal parameters, and what an engine must have."""

    def __init__(self, count: int) -> None:
        super().__init__()
        rows = TOTAL_BYTES // count // (4 * 32)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(rows, 32)) for _ in range(count))

    def generate(self) -> None:
        """Never called."""


class Tally:
    """Messages of each kind since the last `take`."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, kind: str) -> None:
        self._counts[kind] += 1

    def take(self) -> dict[str, int]:
        counts, self._counts = self._counts, Counter()
        return dict(counts)


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[Tally]:
    """Count the calls to engine workers, the rounds of trainer ranks and the frames of shared memory, both ways."""
    tally = Tally()
    call, post, send = HFEngine.call, Group._post, Link.send

    def counted_call(self: HFEngine, method: str, payload: bytes, timeout_s: float | None) -> Sequence[bytes]:
        tally.add(f"call {method}")
        return call(self, method, payload, timeout_s)

    def counted_post(self: Group, envelope: dict[str, object]) -> None:
        tally.add(f"round {envelope['phase']}")
        post(self, envelope)

    def counted_send(self: Link, message: Any, deadline: Deadline, fds: Sequence[int] = ()) -> None:
        tally.add(f"frame {message[0]}")
        send(self, message, deadline, fds)

    patch.setattr(HFEngine, "call", counted_call)
    patch.setattr(Group, "_post", counted_post)
    patch.setattr(Link, "send", counted_send)
    yield tally


def count_between_ranks(patch: pytest.MonkeyPatch, tally: Tally) -> None:
    """Count what ranks say over their links. For a process that is one of them, and has no others' links."""
    put = Outbox.put

    def counted_put(self: Outbox, frame: bytes) -> None:
        tally.add("frame between ranks")
        put(self, frame)

    patch.setattr(Outbox, "put", counted_put)


def config(bucket_bytes: int) -> wsync.SyncConfig:
    return wsync.SyncConfig(bucket_bytes=bucket_bytes, transport="shm", timeout_s=60.0)


def equal(actor: nn.Module, engine: nn.Module) -> bool:
    pairs = zip(actor.parameters(), engine.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def messages(count: int, bucket_bytes: int) -> list[dict[str, int]]:
    """Counts of connecting and of each of two syncs into an engine of this process, over shared memory."""
    actor, model = Toy(count), Toy(count)
    with pytest.MonkeyPatch.context() as patch, counted(patch) as tally:
        with wsync.connect(actor, HFEngine(model), config=config(bucket_bytes)) as session:
            counts = [tally.take()]
            for _ in range(2):
                session.sync()
                counts.append(tally.take())
        assert equal(actor, model)
    return counts


@pytest.mark.parametrize("buckets", [1, BUCKETS])
def test_one_process_sends_as_many_messages_for_3000_tensors_as_for_30(buckets: int) -> None:
    few, many = (messages(count, TOTAL_BYTES // buckets) for count in (FEW, MANY))
    assert many == few
    connect, first, second = few
    each = {"call update": 1, "call publish": 1, "frame commit": buckets, "frame release": buckets}
    assert connect == {"call hello": 1, "call describe": 1}
    assert first == {"call hello": 1, "call attach": 1, "frame welcome": 1, **each}
    assert second == each


def rank_messages(me: Rank, counts: Sequence[int], bucket_bytes: int) -> list[list[dict[str, int]]]:
    """As `messages`, for each number of tensors, with the actor sharded over all ranks; rank 0 owns the engine.

    The first connect of all, in which ranks meet where they will meet before each, is not counted.
    """
    return [_rank_messages(me, count, bucket_bytes) for count in (counts[0], *counts)][1:]


def _rank_messages(me: Rank, count: int, bucket_bytes: int) -> list[dict[str, int]]:
    torch.manual_seed(1)
    actor = Toy(count)
    model = Toy(count) if me.rank == 0 else None
    fully_shard(actor)
    with pytest.MonkeyPatch.context() as patch, counted(patch) as tally:
        count_between_ranks(patch, tally)
        engine = HFEngine(model) if model is not None else None
        with wsync.connect(actor, engine, config=config(bucket_bytes)) as session:
            counts = [tally.take()]
            for _ in range(2):
                session.sync()
                counts.append(tally.take())
    dist.barrier()
    return counts


def test_ranks_exchange_as_many_messages_for_3000_tensors_as_for_30() -> None:
    for few, many in run_ranks(rank_messages, 2, (FEW, MANY), TOTAL_BYTES // BUCKETS, timeout_s=200):
        assert many == few
        rounds = {kind: number for kind, number in few[-1].items() if kind.startswith("round")}
        assert set(rounds.values()) == {1}, "a rank went twice through one phase"
        assert sum(kind.startswith("round bucket") for kind in rounds) == BUCKETS
