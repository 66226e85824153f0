"""200 syncs of the GPU suite as far as they go without a GPU, and how workers say where their parameters lie."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import wsync
from tests.engines.hf_models import FAMILIES, seeded
from wsync.bench.gpu import engines, models, steady, workers
from wsync.bench.gpu.checks import UNMOVED, in_place
from wsync.bench.gpu.far_vllm import FarVLLM
from wsync.bench.gpu.loops import LoopExtension
from wsync.bench.gpu.outcome import Outcome
from wsync.report import SyncReport

HOLDS, ALLOCATES = "200 syncs hold nothing more", "200 syncs allocate nothing on the device"
WORKERS = "descriptors of the engine's workers"


class WorkerOfVLLM(LoopExtension):
    def __init__(self) -> None:
        self.model = nn.Linear(3, 2)

    def get_model(self) -> nn.Module:
        return self.model


class EngineOfVLLM:
    """Calls a method of its one worker by name, as `vllm.LLM` does."""

    def __init__(self) -> None:
        self.worker = WorkerOfVLLM()

    def collective_rpc(self, method: str) -> list[bytes]:
        return [getattr(self.worker, method)()]


def test_a_worker_says_which_process_it_is_and_where_its_parameters_lie() -> None:
    engine = EngineOfVLLM()
    [worker] = workers.seen(engine)
    model = engine.worker.model
    assert worker.pid == os.getpid()
    assert worker.addresses == {"weight": model.weight.data_ptr(), "bias": model.bias.data_ptr()}


def test_a_parameter_that_moves_is_found() -> None:
    engine, outcome = EngineOfVLLM(), Outcome(case="x")
    with in_place(outcome, engine):
        engine.worker.model.weight.data.fill_(1)
    assert outcome.checks == {UNMOVED: True}
    with in_place(outcome, engine):
        engine.worker.model.weight.data = torch.ones(2, 3)
    assert outcome.checks == {UNMOVED: False}


def test_a_block_that_fails_says_nothing_of_places() -> None:
    outcome = Outcome(case="x")
    with pytest.raises(RuntimeError, match="on purpose"), in_place(outcome, EngineOfVLLM()):
        raise RuntimeError("on purpose")
    assert outcome.checks == {}


def test_an_engine_on_another_gpu_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Served:
        using = ExitStack

    engine = EngineOfVLLM()
    monkeypatch.setattr(engines, "start_vllm", lambda *arguments, **options: engine)
    monkeypatch.setattr(wsync, "serve", lambda engine: Served())
    assert FarVLLM(Path(), "").reports() == engine.collective_rpc("loop_report")


def test_sglang_is_told_a_file_to_answer_in(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    workers.tell(model, [(str(tmp_path / "report"), torch.zeros(1))])
    assert (tmp_path / "report").read_bytes() == workers.report(model)


def syncing(actor: nn.Module, each: Callable[[], None] = lambda: None) -> Outcome:
    """What comes of syncs into a model of this process, with `each` beside every one."""
    outcome, engine = Outcome(case="vllm-200"), seeded(FAMILIES["llama"], 2)
    with wsync.connect(actor, engine) as session:
        healthy = session.sync

        def sync(version: int | None = None) -> SyncReport:
            each()
            return healthy(version)

        session.sync = sync  # type: ignore[method-assign]
        steady.check_held(outcome, session, [os.getpid()])
    return outcome


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of this process's device, each as one element."""
    made = [1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocation.all.allocated": len(made)})
    return made


def test_200_syncs_hold_and_allocate_nothing(allocations: list[int]) -> None:
    syncs = []
    outcome = syncing(seeded(FAMILIES["llama"], 1), lambda: syncs.append(1))
    assert outcome.checks == {HOLDS: True, ALLOCATES: True}
    assert len(syncs) > steady.SYNCS == 200
    before = outcome.facts["before"]
    assert isinstance(before, dict)
    assert before[WORKERS] == [before["descriptors"]]


def test_what_is_left_open_and_what_is_allocated_is_told(
    allocations: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "SYNCS", 5)
    opened = []

    def leak() -> None:
        opened.append(os.open(os.devnull, os.O_RDONLY))
        allocations.append(1)

    outcome = syncing(seeded(FAMILIES["llama"], 1), leak)
    for descriptor in opened:
        os.close(descriptor)
    assert outcome.checks == {HOLDS.replace("200", "5"): False, ALLOCATES.replace("200", "5"): False}
    assert outcome.facts["device allocations of the trainer in 5 syncs"] == 5


def test_slots_go_around_the_ring_more_than_once_a_sync() -> None:
    config = models.config_of(models.DENSE, torch.bfloat16, small=True)
    nbytes = sum(tensor.nbytes for _, tensor in models.engine_side(models.make_actor(config, torch.bfloat16, 1, "cpu")))
    assert nbytes > 2 * steady.SLOTS.config.num_slots * steady.SLOTS.config.bucket_bytes


def test_the_cases_have_the_engine_where_they_say() -> None:
    from wsync.bench.gpu.cases import CASES

    found = {name: case.separate for name, case in CASES.items() if name.startswith("vllm-200")}
    assert found == {"vllm-200": False, "vllm-200-ipc": True, "vllm-200-slots": True, "vllm-200-pull": True}
