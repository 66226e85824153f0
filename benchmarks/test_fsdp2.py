"""FSDP2 on two gloo ranks: wsync against the loops that export one parameter after the other."""

from collections.abc import Callable, Sequence

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.gather import CAST_FIRST, FULL_TENSOR, GATHER, SYNC, TIMEOUT_S, take
from benchmarks.measure import Samples, TakenElsewhere
from benchmarks.record import Row
from wsync.testing.ranks import run_ranks

COUNT = 320
RANKS = 2
ROUNDS = 9
KIB = 1 << 10
TIMER = TakenElsewhere()


@pytest.mark.benchmark(timer=TIMER)
@pytest.mark.parametrize("senders", [[0], [0, 1]], ids=["one-sender", "all-send"])
@pytest.mark.parametrize(("kib", "reference", "target"), [(64, FULL_TENSOR, 5.0), (2048, CAST_FIRST, 1.0)])
def test_gather(
    benchmark: BenchmarkFixture,
    keep: Callable[[Row], None],
    small: bool,
    senders: Sequence[int],
    kib: int,
    reference: str,
    target: float,
) -> None:
    nbytes = (16 if small else kib) * KIB
    [(loops, ways), *_] = run_ranks(take, RANKS, COUNT, nbytes, senders, ROUNDS, timeout_s=TIMEOUT_S)
    TIMER.show(benchmark, ways[GATHER])
    for name in (SYNC, GATHER):
        row = Row(
            case=f"FSDP2 {name}, {COUNT} x {nbytes // KIB} KiB, {len(senders)} sender(s)",
            transport="gloo" if name == GATHER else "gloo, inproc",
            ranks=RANKS,
            tensors=COUNT,
            nbytes=COUNT * nbytes // 2,
            samples=Samples(seconds=ways[name], references=loops),
            reference=reference,
            target=target if name == GATHER else None,
        )
        keep(row)
