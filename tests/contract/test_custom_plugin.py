"""The worked example of a producer and an engine of one's own: both pass the kits, and are found once installed."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from examples.custom_producer.wsync_ledger import Ledger, LedgerProducer, Lookup, LookupEngine
from wsync.group import Group
from wsync.protocols import Engine, Producer
from wsync.testing.engine_conformance import ENGINE_CHECKS, EngineBench
from wsync.testing.producer_conformance import PRODUCER_CHECKS, ProducerBench
from wsync.transports.inproc import InprocTransport

FOLDER = Path("examples/custom_producer").resolve()

PROGRAM = """
import torch, wsync
from wsync import registry
from wsync_ledger import Ledger, Lookup
ledger = Ledger({"prices": torch.rand(300, 7), "names": torch.arange(9)})
lookup = Lookup({name: torch.zeros_like(weight) for name, weight in ledger.weights.items()})
for turn in (1, 2, 3):
    ledger.weights["prices"].add_(turn)
    assert wsync.sync(ledger, lookup).version == turn
    assert torch.equal(lookup.tables["prices"], ledger.weights["prices"])
try:
    registry.find_trainer(3)
except wsync.UnsupportedError as error:
    print(error)
"""

_ledgers: dict[int, Ledger] = {}


def make(tensors: Mapping[str, torch.Tensor]) -> Producer:
    ledger = Ledger(tensors)
    producer = LedgerProducer(ledger)
    _ledgers[id(producer)] = ledger
    return producer


def change(producer: Producer, tensors: Mapping[str, torch.Tensor]) -> None:
    _ledgers[id(producer)].weights.update(tensors)


class Tables(nn.Module):
    """An actor of several buckets for the engine's kit."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        bits = torch.Generator().manual_seed(seed)
        for index in range(4):
            self.register_parameter(f"t{index}", nn.Parameter(torch.randn(200, 90 + index, generator=bits)))


@pytest.mark.parametrize("check", PRODUCER_CHECKS, ids=lambda check: check.__name__)
def test_producer_kit(check: Callable[[ProducerBench], None]) -> None:
    check(ProducerBench(make=make, change=change, group=Group(0, 1, None, 5.0)))


@pytest.fixture(scope="module")
def lookup() -> Lookup:
    return Lookup(Tables(0).state_dict())


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_engine_kit(lookup: Lookup, check: Callable[[EngineBench], None]) -> None:
    def resident(actor: nn.Module) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        return {name: (lookup.tables[name], wanted) for name, wanted in actor.state_dict().items()}

    check(
        EngineBench(
            engine=LookupEngine(lookup),
            transport=InprocTransport(),
            make_actor=Tables,
            resident=resident,
            serve=lambda: lookup.answer(3),
        )
    )


def test_the_contracts_are_met() -> None:
    assert isinstance(make({}), Producer)
    assert isinstance(LookupEngine(Lookup({})), Engine)


def test_once_installed_it_is_found_through_its_entry_points(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "wsync_ledger.py"):
        (source / name).write_bytes((FOLDER / name).read_bytes())
    subprocess.run([*pip, "--target", str(tmp_path / "site"), str(source)], check=True, timeout=120)
    (tmp_path / "program.py").write_text(
        f"import sys\nsys.path[:0] = [{str(tmp_path / 'site')!r}, {str(FOLDER.parent.parent)!r}]\n{PROGRAM}"
    )
    done = subprocess.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ledger: wsync_ledger:LedgerProducer, from wsync-ledger 0.1" in done.stdout
