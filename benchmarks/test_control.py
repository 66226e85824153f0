"""Costs that grow with the number of tensors, not with bytes: the same 40 MiB in few tensors and in many."""

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import wsync
from benchmarks.measure import MEMCPY_EACH, measure, memcpy_ways
from benchmarks.models import Equal, payload
from benchmarks.record import Row
from wsync.adapters.engines.hf import HFEngine

ROUNDS = 9
TOTAL_BYTES = 40 << 20


@pytest.mark.parametrize("transport", ["inproc", "shm"])
@pytest.mark.parametrize("count", [100, 10_000])
def test_time_a_byte(
    benchmark: BenchmarkFixture, keep: Callable[[Row], None], small: bool, transport: str, count: int
) -> None:
    nbytes = TOTAL_BYTES // count // (16 if small else 1)
    torch.set_num_threads(1)
    actor, model = Equal(count, nbytes), Equal(count, nbytes)
    with wsync.connect(actor, HFEngine(model), config=wsync.SyncConfig(transport=transport)) as session:
        samples = measure(benchmark, session.sync, memcpy_ways(payload(actor)), ROUNDS)
    assert all(torch.equal(one, other) for one, other in zip(payload(actor), payload(model), strict=True))
    row = Row(
        case=f"one process, {count} x {nbytes} B over {transport}",
        transport=transport,
        ranks=1,
        tensors=count,
        nbytes=count * nbytes,
        samples=samples,
        reference=MEMCPY_EACH,
        note=f"{samples.median_s / count * 1e6:.1f} us a tensor",
    )
    keep(row)


@pytest.mark.parametrize("count", [100, 10_000])
def test_connect(benchmark: BenchmarkFixture, keep: Callable[[Row], None], small: bool, count: int) -> None:
    nbytes = TOTAL_BYTES // count // (16 if small else 1)
    torch.set_num_threads(1)
    actor, model = Equal(count, nbytes), Equal(count, nbytes)
    engine = HFEngine(model)
    samples = measure(benchmark, lambda: wsync.connect(actor, engine).close(), memcpy_ways(payload(actor)), 3)
    row = Row(
        case=f"connect, {count} tensors",
        transport="inproc",
        ranks=1,
        tensors=count,
        nbytes=count * nbytes,
        samples=samples,
        reference=MEMCPY_EACH,
        note=f"{samples.median_s / count * 1e6:.1f} us a tensor",
    )
    keep(row)
