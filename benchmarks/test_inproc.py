"""Module to embedded engine in one process: every byte is read once and written once, so memcpy is the ceiling."""

from collections.abc import Callable

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

import wsync
from benchmarks.measure import MEMCPY_EACH, ONE_CAST, cast_way, measure, memcpy_ways
from benchmarks.models import llama, nbytes_of, payload
from benchmarks.record import Row
from wsync.adapters.engines.hf import HFEngine

ROUNDS = 9
TARGET = 0.9
DEFAULT_THREADS = torch.get_num_threads()
"""What a user has who sets nothing: torch copies with as many threads as there are cores. The target is for that."""


@pytest.mark.parametrize("threads", sorted({1, DEFAULT_THREADS}))
def test_same_dtype(benchmark: BenchmarkFixture, keep: Callable[[Row], None], small: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    actor, model = llama(seed=1, small=small), llama(seed=2, small=small)
    with wsync.connect(actor, HFEngine(model)) as session:
        samples = measure(benchmark, session.sync, memcpy_ways(payload(actor)), ROUNDS)
    check_equal(actor, model)
    row = Row(
        case=f"in process, fp32 to fp32, {threads} thread(s)",
        transport="inproc",
        ranks=1,
        tensors=len(payload(actor)),
        nbytes=nbytes_of(model, torch.float32),
        samples=samples,
        reference=MEMCPY_EACH,
        target=TARGET if threads == DEFAULT_THREADS else None,
    )
    keep(row)


@pytest.mark.parametrize("threads", sorted({1, DEFAULT_THREADS}))
def test_cast(benchmark: BenchmarkFixture, keep: Callable[[Row], None], small: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    actor, model = llama(seed=1, small=small), llama(seed=2, small=small).bfloat16()
    with wsync.connect(actor, HFEngine(model)) as session:
        samples = measure(benchmark, session.sync, {ONE_CAST: cast_way(payload(actor), torch.bfloat16)}, ROUNDS)
    check_equal(actor, model)
    row = Row(
        case=f"in process, fp32 to bf16, {threads} thread(s)",
        transport="inproc",
        ranks=1,
        tensors=len(payload(actor)),
        nbytes=nbytes_of(model, torch.bfloat16),
        samples=samples,
        reference=ONE_CAST,
        target=TARGET if threads == DEFAULT_THREADS else None,
    )
    keep(row)


def check_equal(actor: torch.nn.Module, model: torch.nn.Module) -> None:
    for one, other in zip(payload(actor), payload(model), strict=True):
        assert torch.equal(one.to(other.dtype), other)
