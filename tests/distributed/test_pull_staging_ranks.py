"""Real ranks that cast what other processes read of them, as they would if each of them had a device of its own."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import wsync
from tests.distributed.exchange_steps import Case, Outcome, run_cases
from tests.distributed.sharded_models import LAYOUTS, full_tensors, llama, move_shards, shard, train_step
from wsync.bench.receiver import BareEngine, BareLoader
from wsync.pull import holders, host_reads
from wsync.testing.ranks import Rank, run_ranks
from wsync.topology import Endpoint
from wsync.worker import Worker

PULL = wsync.SyncConfig(path="pull", timeout_s=20.0)
CASES = ["fsdp2", "fsdp2 tied", "fsdp2 dim 1", "fsdp2 moe", "tp", "ddp"]


def between_processes(owner: Endpoint, reader: Endpoint) -> bool:
    return owner.process != reader.process


def receiver(model: nn.Module) -> BareEngine:
    return BareEngine(
        {name: torch.zeros_like(full, dtype=torch.bfloat16) for name, full in full_tensors(model).items()}
    )


def held(model: nn.Module) -> int:
    """Elements of this rank."""
    parameters = list(model.parameters())
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)


def wrong(engine: BareEngine, model: nn.Module) -> list[str]:
    return [n for n, t in full_tensors(model).items() if not torch.equal(engine.tensors[n], t.to(torch.bfloat16))]


def cast_and_pulled(me: Rank, name: str) -> None:
    """Each rank's engine reads what its own process has in fp32, and all else in bf16."""
    model = LAYOUTS[name]()
    engine = receiver(model)
    numel = sum(tensor.numel() for tensor in engine.tensors.values())
    own = held(model)
    with wsync.connect(model, engine, config=PULL) as session:
        expected = session.slot_bytes
        assert (expected > 0) is (own < numel), "whole tensors are everybody's own"
        for step in range(3):
            train_step(model, step)
            report = session.sync()
            assert wrong(engine, model) == [], step
            assert report.pulled_nbytes == own * 4 + (numel - own) * 2
            assert report.peak_bytes == expected
            if step == 1:
                session.release_slots()


def storage_that_moved(me: Rank) -> None:
    model = shard(llama())
    engine = receiver(model)
    mine = engine if me.rank == 0 else None
    with wsync.connect(model, mine, config=PULL) as session:
        assert (session.slot_bytes > 0) is (me.rank == 1), "nobody reads rank 0 over a link"
        session.sync()
        move_shards(model)
        train_step(model, 1)
        session.sync()
        found = full_tensors(model)
        assert mine is None or all(torch.equal(engine.tensors[n], t.to(torch.bfloat16)) for n, t in found.items())


def with_a_limit(me: Rank) -> None:
    model = shard(llama())
    engine = receiver(model)
    numel, own = sum(tensor.numel() for tensor in engine.tensors.values()), held(model)
    pulled = []
    for limit_bytes in (0, 4096, 1 << 30):
        config = wsync.SyncConfig(path="pull", timeout_s=20.0, staging_bytes=limit_bytes)
        with wsync.connect(model, engine, config=config) as session:
            train_step(model, limit_bytes)
            report = session.sync()
            assert wrong(engine, model) == []
            assert report.peak_bytes <= limit_bytes
            pulled.append(report.pulled_nbytes)
    assert pulled[0] == numel * 4
    assert pulled[0] - 4096 <= pulled[1] < pulled[0]
    assert pulled[2] == own * 4 + (numel - own) * 2


def a_sync_that_fails(me: Rank) -> None:
    """Rank 0's engine fails after it has read a part; the next sync has no byte of the first one."""
    model = shard(llama())
    engine = receiver(model)
    with wsync.connect(model, engine, config=PULL) as session:
        session.sync()
        train_step(model, 1)
        healthy = host_reads._read_runs

        def fail(pid: int, moves: Any) -> None:
            healthy(pid, moves)
            if pid != os.getpid():
                raise RuntimeError("the link failed")

        if me.rank == 0:
            host_reads._read_runs = fail
        try:
            with pytest.raises(wsync.WsyncError, match="the link failed"):
                session.sync()
        finally:
            host_reads._read_runs = healthy
        if me.rank == 0:
            with pytest.raises(wsync.EngineStateError, match="no consistent version"):
                engine.version()
        train_step(model, 2)
        session.sync()
        assert wrong(engine, model) == []


def all_cases(me: Rank, cases: list[Case]) -> dict[str, Outcome]:
    holders.crosses_link = between_processes
    return run_cases(me, cases)


class HalfLoader(BareLoader):
    """A worker of two, which takes half of the columns of every matrix, and all of what has no columns."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
        super().__init__(tensors)
        self._rank = rank

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self._tensors[name].copy_(half(weight, self._rank))


def half(weight: torch.Tensor, rank: int) -> torch.Tensor:
    return weight if weight.dim() < 2 else weight.chunk(2, dim=1)[rank]


class HalfEngine(BareEngine):
    """One of two parts of a replica, in the process of a rank and on its device."""

    replica = "both"

    def __init__(self, full: Mapping[str, torch.Tensor], rank: int, device: torch.device) -> None:
        parts = {name: half(weight, rank).to(device, torch.bfloat16, copy=True) for name, weight in full.items()}
        super().__init__(parts)
        self.loader, self._rank = HalfLoader(parts, rank), rank
        self._worker = Worker(self.loader)

    def has(self, full: Mapping[str, torch.Tensor]) -> bool:
        wanted = {name: half(weight, self._rank).to(torch.bfloat16) for name, weight in full.items()}
        return all(torch.equal(self.tensors[name].cpu(), part) for name, part in wanted.items())


def renewed(model: nn.Module, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Random weights, put into the shards of this rank."""
    generator, full = torch.Generator().manual_seed(seed), {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        full[name] = torch.randn(parameter.shape, generator=generator)
        parameter.to_local().copy_(full[name].chunk(2)[rank])
    return full


@torch.no_grad()
def columns_and_rows(me: Rank, kind: str) -> None:
    """Ranks have rows, workers columns: a quarter of each matrix crosses each way, and half of each vector."""
    device = torch.device(kind, me.rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 256, bias=False), nn.LayerNorm(256)).to(device)
    fully_shard(model, mesh=init_device_mesh(kind, (2,)))
    full = renewed(model, me.rank, 0)
    crossing = sum(weight.numel() // (4 if weight.dim() == 2 else 2) for weight in full.values())
    engine = HalfEngine(full, me.rank, device)
    for limit_bytes, itemsize in ((1 << 30, 2), (0, 4)):
        config = wsync.SyncConfig(path="pull", timeout_s=60.0, staging_bytes=limit_bytes)
        with wsync.connect(model, engine, config=config) as session:
            for step in range(1, 4):
                full, expected_bytes = renewed(model, me.rank, step), session.slot_bytes
                report = session.sync()
                assert engine.has(full), step
                assert report.pulled_nbytes == crossing * (itemsize + 4)
                assert report.peak_bytes == (crossing * 2 if limit_bytes else 0)
                assert expected_bytes == (report.peak_bytes if step != 2 else 0)
                if step == 2:
                    session.release_slots()


OTHERS = [storage_that_moved, with_a_limit, a_sync_that_fails]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Outcome]]:
    cases = [Case(name=name, run=cast_and_pulled, args=(name,)) for name in CASES]
    cases += [Case(name=run.__name__, run=run) for run in OTHERS]
    cases.append(Case(name=columns_and_rows.__name__, run=columns_and_rows, args=("cpu",)))
    by_rank = run_ranks(all_cases, 2, cases, timeout_s=300)
    return {case.name: [mine[case.name] for mine in by_rank] for case in cases}


@pytest.mark.parametrize("name", [*CASES, *(run.__name__ for run in (*OTHERS, columns_and_rows))])
def test_two_ranks(outcomes: dict[str, list[Outcome]], name: str) -> None:
    assert [outcome.error for outcome in outcomes[name]] == ["", ""]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_two_gpus() -> None:
    run_ranks(columns_and_rows, 2, "cuda", timeout_s=300)
