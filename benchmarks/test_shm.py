"""Trainer and engine in two processes of one host, through slots or pulled. One thread each, the whole stack."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

import wsync
from benchmarks.measure import ONE_CAST, Way, cast_way, measure, memcpy_ways
from benchmarks.models import llama, nbytes_of, payload
from benchmarks.record import Row
from wsync.adapters.engines.hf import HFEngine
from wsync.config import MIB

ROUNDS = 7
TARGET = 0.6
DEFAULTS = wsync.SyncConfig()
AS_LARGE_IN_FOUR = (128, 4)
"""As much memory as the default, 2 slots of 256 MiB. With four, neither side waits for each step of the other."""

SIZES = [(256, 2), AS_LARGE_IN_FOUR, (256, 3), (64, 2), (64, 4), (16, 4), (8, 2), (2, 2)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A trainer's model here, an engine in another process, and what they are compared with."""

    actor: nn.Module
    engine: HFEngine
    dtype: torch.dtype
    """Of the engine, and so on the wire."""

    references: Mapping[str, Way]
    """The first one is the ceiling."""

    def measure(self, benchmark: BenchmarkFixture, config: wsync.SyncConfig, target: float | None) -> Row:
        """Time the syncs of one session, then compare weights bit for bit."""
        torch.set_num_threads(1)
        with wsync.connect(self.actor, self.engine, config=config) as session:
            samples = measure(benchmark, session.sync, self.references, ROUNDS)
        for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
            [resident] = self.engine.read(name)
            assert torch.equal(resident, self.actor.get_parameter(name).detach().to(self.dtype)), name
        dtype = str(self.dtype).removeprefix("torch.")
        return Row(
            case=f"2 processes, to {dtype}, {_way(config)}",
            transport="shm",
            ranks=1,
            tensors=len(payload(self.actor)),
            nbytes=nbytes_of(self.actor, self.dtype),
            samples=samples,
            reference=next(iter(self.references)),
            target=target,
        )


@contextmanager
def started(dtype: torch.dtype, small: bool) -> Iterator[Pair]:
    """A pair on different weights. The engine takes seconds to start, so tests share it."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("OMP_NUM_THREADS", "1")
        llama(seed=2, small=small).to(dtype).save_pretrained(folder)
        actor = llama(seed=1, small=small)
        with HFEngine.launch(folder) as engine:
            weights = payload(actor)
            same = dtype == torch.float32
            references = memcpy_ways(weights) if same else {ONE_CAST: cast_way(weights, dtype)}
            yield Pair(actor=actor, engine=engine, dtype=dtype, references=references)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """For the dtype that a test asks for."""
    with started(request.param, request.config.getoption("--small")) as one:
        yield one


def _way(config: wsync.SyncConfig) -> str:
    if config.path == "pull":
        return "pulled"
    return f"{config.num_slots} slots of {config.bucket_bytes / MIB:g} MiB"


TO_FP32 = pytest.mark.parametrize("pair", [torch.float32], indirect=True, ids=["fp32"])
TO_BF16 = pytest.mark.parametrize("pair", [torch.bfloat16], indirect=True, ids=["bf16"])


@TO_FP32
@pytest.mark.parametrize(("mib", "num_slots"), SIZES)
def test_sizes(pair: Pair, benchmark: BenchmarkFixture, keep: Callable[[Row], None], mib: int, num_slots: int) -> None:
    config = wsync.SyncConfig(bucket_bytes=mib * MIB, num_slots=num_slots)
    keep(pair.measure(benchmark, config, TARGET if (mib, num_slots) == AS_LARGE_IN_FOUR else None))


@TO_BF16
def test_cast(pair: Pair, benchmark: BenchmarkFixture, keep: Callable[[Row], None]) -> None:
    keep(pair.measure(benchmark, DEFAULTS, None))


@pytest.mark.parametrize("pair", [torch.float32, torch.bfloat16], indirect=True, ids=["fp32", "bf16"])
def test_pull(pair: Pair, benchmark: BenchmarkFixture, keep: Callable[[Row], None]) -> None:
    keep(pair.measure(benchmark, wsync.SyncConfig(path="pull"), None))
