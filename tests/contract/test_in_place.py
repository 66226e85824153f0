"""Whole syncs in which the engine's worker reads parameters where the trainer has them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.contract.arena import Arena, ArenaTransport
from wsync import handshake
from wsync.adapters.engines.hf import HFEngine
from wsync.adapters.trainers.module import ModuleProducer
from wsync.config import SyncConfig
from wsync.errors import TransportError
from wsync.group import Group
from wsync.session import Session
from wsync.topology import local_endpoint
from wsync.worker import Worker


class Net(nn.Module):
    """Taken for a model that generates."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = nn.Linear(64, 48), nn.Linear(48, 8, bias=False)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


class OnDevice(ModuleProducer):
    """Says that its weights are on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Arena]]:
    monkeypatch.setattr(handshake, "local_endpoint", lambda device: local_endpoint("cpu"))
    defaults = {**(Worker.__init__.__kwdefaults__ or {}), "transport": lambda name: ArenaTransport()}
    monkeypatch.setattr(Worker.__init__, "__kwdefaults__", defaults)
    made = [Arena(1 << 20), Arena(1 << 20)]
    yield made
    for arena in made:
        arena.close()


def moved(actor: nn.Module, arena: Arena) -> None:
    for parameter in actor.parameters():
        parameter.data = arena.put(parameter.data)


def connected(actor: nn.Module, engine: nn.Module) -> Session:
    config = SyncConfig(bucket_bytes=4096, timeout_s=30.0)
    return Session(OnDevice(actor), [HFEngine(engine)], [ArenaTransport()], Group(0, 1, None, 30.0), config)


def same(actor: nn.Module, engine: nn.Module) -> bool:
    return all(torch.equal(a, e) for a, e in zip(actor.parameters(), engine.parameters(), strict=True))


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:wsync")


def test_parameters_are_read_where_they_are_wherever_they_go(arenas: list[Arena]) -> None:
    actor, engine = Net(1), Net(2)
    moved(actor, arenas[0])
    with connected(actor, engine) as session:
        assert "read where the trainer has it" in session.explain()
        assert session.slot_bytes == 0
        for step in range(6):
            with torch.no_grad():
                actor.head.weight.add_(1)
            if step == 2:
                moved(actor, arenas[1])
            if step == 3:
                old = actor.body.weight
                actor.body.weight = nn.Parameter(arenas[0].put(torch.randn_like(old)))
            session.sync()
            assert same(actor, engine)


def test_nothing_of_the_trainers_is_mapped_once_slots_are_given_back(arenas: list[Arena]) -> None:
    actor, engine = Net(1), Net(2)
    moved(actor, arenas[0])
    before = mapped()
    with connected(actor, engine) as session:
        for _ in range(2):
            session.sync()
            assert mapped() > before
            session.release_slots()
            assert mapped() == before
        session.sync()
        assert same(actor, engine)
    assert mapped() == before


def test_memory_that_cannot_be_exported_goes_through_slots(arenas: list[Arena]) -> None:
    actor, engine = Net(1), Net(2)
    with connected(actor, engine) as session:
        assert "in buckets, because shm: " in session.explain()
        assert "is in no arena" in session.explain()
        assert session.slot_bytes > 0
        for _ in range(3):
            with torch.no_grad():
                actor.head.weight.add_(1)
            report = session.sync()
            assert report.stages["acquire"] > 0
            assert same(actor, engine)
    assert report.peak_bytes > 0


def test_memory_that_cannot_be_exported_any_more_ends_the_sync_before_a_byte_is_written(arenas: list[Arena]) -> None:
    actor, engine = Net(1), Net(2)
    moved(actor, arenas[0])
    with connected(actor, engine) as session:
        session.sync()
        kept = engine.head.weight.clone()
        actor.head.weight.data = torch.randn_like(actor.head.weight)
        with pytest.raises(TransportError, match="is in no arena"):
            session.sync()
        assert torch.equal(engine.head.weight, kept)
        assert session.engines[0].version() == 1
        moved(actor, arenas[1])
        session.sync()
        assert same(actor, engine)
