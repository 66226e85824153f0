"""What trainer ranks pay to agree on something: rounds of wsync's beside exchanges by what torch has for that."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch._C._distributed_c10d import PrefixStore, Store

from benchmarks.measure import Samples, TakenElsewhere, Way
from benchmarks.record import Row
from wsync import wire
from wsync.deadline import Deadline
from wsync.group import Group
from wsync.testing.ranks import Rank, run_ranks

EACH = 100
ROUNDS = 9
TIMEOUT_S = 300.0
STORE, OBJECTS = "set and get in the store", "all_gather_object"
MESSAGE = {"phase": "bucket 3", "message": None, "error": None}
TIMER = TakenElsewhere()


class InTheStore:
    """The same by the store of the ranks: everybody sets a key and gets those of all."""

    def __init__(self, me: Rank, store: Store) -> None:
        self._rank, self._world_size, self._store = me.rank, me.world_size, store
        self._number = 0

    def __call__(self) -> None:
        self._number += 1
        keys = [f"{self._number}/{rank}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], wire.pack(MESSAGE))  # type: ignore[arg-type]
        self._store.wait(keys, timedelta(seconds=TIMEOUT_S))
        for data in self._store.multi_get(keys):
            wire.unpack(data)


def take(me: Rank, rounds: int, each: int) -> tuple[Mapping[str, tuple[float, ...]], tuple[float, ...]]:
    """Seconds on this rank of `each` exchanges by torch, `rounds` + 1 times, and by wsync in between."""
    group = Group(me.rank, me.world_size, PrefixStore("rounds", me.store), TIMEOUT_S)
    group.enter()
    objects: list[Any] = [None] * me.world_size
    others: dict[str, Way] = {
        STORE: InTheStore(me, PrefixStore("store", me.store)),
        OBJECTS: partial(dist.all_gather_object, objects, MESSAGE),
    }

    def own() -> None:
        group.round("bucket 3", None, Deadline.after(TIMEOUT_S))

    for way in (own, *others.values()):
        _seconds(way, each)
    before = [{name: _seconds(way, each) for name, way in others.items()}]
    taken = []
    for _ in range(rounds):
        taken.append(_seconds(own, each))
        before.append({name: _seconds(way, each) for name, way in others.items()})
    group.close()
    return {name: tuple(sample[name] for sample in before) for name in others}, tuple(taken)


def _seconds(way: Way, each: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(each):
        way()
    return time.perf_counter() - start


@pytest.mark.benchmark(timer=TIMER)
@pytest.mark.parametrize("ranks", [2, 4])
def test_round(benchmark: BenchmarkFixture, keep: Callable[[Row], None], small: bool, ranks: int) -> None:
    each = 10 if small else EACH
    [(others, taken), *_] = run_ranks(take, ranks, ROUNDS, each, timeout_s=TIMEOUT_S)
    TIMER.show(benchmark, taken)
    samples = Samples(seconds=taken, references=others)
    row = Row(
        case=f"{each} rounds of {ranks} ranks",
        transport="links",
        ranks=ranks,
        tensors=0,
        nbytes=each * ranks * len(wire.pack(MESSAGE)),
        samples=samples,
        reference=OBJECTS,
        target=5.0,
        note=f"{samples.median_s / each * 1e6:.0f} us a round",
    )
    keep(row)
