"""ZeRO-3 on two gloo ranks: wsync against DeepSpeed's `GatheredParameters`, one by one and at once."""

from collections.abc import Callable, Sequence

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gather import GATHER, SYNC, TIMEOUT_S
from benchmarks.measure import Samples, TakenElsewhere
from benchmarks.record import Row
from benchmarks.zero3 import EACH, take
from wsync.testing.ranks import run_ranks

COUNT = 320
RANKS = 2
ROUNDS = 5
KIB = 1 << 10
TIMER = TakenElsewhere()


@pytest.mark.benchmark(timer=TIMER)
@pytest.mark.parametrize("senders", [[0], [0, 1]], ids=["one-sender", "all-send"])
@pytest.mark.parametrize("kib", [64, 2048])
def test_gather(
    benchmark: BenchmarkFixture, keep: Callable[[Row], None], small: bool, senders: Sequence[int], kib: int
) -> None:
    nbytes = (16 if small else kib) * KIB
    [(loops, ways), *_] = run_ranks(take, RANKS, COUNT, nbytes, senders, ROUNDS, timeout_s=TIMEOUT_S)
    TIMER.show(benchmark, ways[GATHER])
    for name in (SYNC, GATHER):
        row = Row(
            case=f"ZeRO-3 {name}, {COUNT} x {nbytes // KIB} KiB, {len(senders)} sender(s)",
            transport="gloo" if name == GATHER else "gloo, inproc",
            ranks=RANKS,
            tensors=COUNT,
            nbytes=COUNT * nbytes,
            samples=Samples(seconds=ways[name], references=loops),
            reference=EACH,
        )
        keep(row)
