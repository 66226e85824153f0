"""The pipe to a program on another GPU, as far as it goes without one."""

import importlib
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from wsync import wire
from wsync.bench.gpu import engines, far_vllm, models, moonshot, nccl_case
from wsync.bench.gpu.checks import Answers, says
from wsync.bench.gpu.far import Far
from wsync.bench.gpu.far_end import answer
from wsync.bench.gpu.models import DENSE
from wsync.bench.gpu.moonshot import Moonshot
from wsync.bench.gpu.outcome import Outcome
from wsync.bench.gpu.raw_peer import sizes_of
from wsync.errors import PeerError
from wsync.memory.sizes import GIB

PATIENCE_S = 30.0
ROOT = Path(__file__).parents[2]
STAND_IN, SETTINGS = "tests.unit.far_program", (f"PYTHONPATH={ROOT}",)


class Methods:
    def double(self, number: int) -> int:
        return 2 * number

    def fail(self) -> None:
        raise RuntimeError("on purpose")


def test_answers_come_in_order_until_one_fails() -> None:
    ours, theirs = Pipe()
    raised: list[BaseException] = []

    def serve() -> None:
        try:
            answer(theirs, Methods)
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    for words in (("double", 3), ("double", 4), ("fail",)):
        ours.send_bytes(wire.pack(words))
    said = [wire.unpack(ours.recv_bytes()) for _ in range(4)]
    thread.join(PATIENCE_S)
    assert said[:3] == [("done", None), ("done", 6), ("done", 8)]
    assert said[3][0] == "failed"  # type: ignore[index]
    assert [str(error) for error in raised] == ["on purpose"]


def test_a_program_that_ends_is_told_by_name() -> None:
    with Far("wsync.bench.gpu.no_such_program") as far, pytest.raises(PeerError, match="no_such_program died"):
        far.hear()


def test_buffers_take_all_bytes() -> None:
    assert sizes_of(2 * GIB + 5) == [GIB, GIB, 5]
    assert sizes_of(GIB) == [GIB]


class Engine:
    """Keeps what its workers are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def collective_rpc(self, method: str, args: tuple[object, ...]) -> None:
        self.calls.append((method, args))


def test_a_start_that_fails_is_told() -> None:
    with Far(STAND_IN, "no-such-shape", settings=SETTINGS) as far, pytest.raises(PeerError, match="failed") as caught:
        far.hear()
    assert "cannot make no-such-shape" in caught.value.remote_traceback


def test_a_vllm_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, dtype: str, **options: object) -> None:
        raise RuntimeError(f"no vLLM for {folder}")

    monkeypatch.setattr(engines, "start_vllm", refuse)
    ours, theirs = Pipe()
    with ours, theirs:
        with pytest.raises(RuntimeError, match="no vLLM"):
            far_vllm.main(os.dup(theirs.fileno()), Path("folder"), "")
        kind, value = cast("tuple[str, str]", wire.unpack(ours.recv_bytes()))
    assert kind == "failed"
    assert "no vLLM for folder" in value


def test_what_a_method_asks_for_is_heeded_before_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moonshot, "SERVER", STAND_IN)
    monkeypatch.setattr(moonshot, "_SETTINGS", SETTINGS)
    engine = Engine()
    with moonshot.process_beside(engine, DENSE, torch.bfloat16) as far:
        rival = Moonshot(far)
        assert rival.register() == 0.25
        rival.update()
        rival.register_and_update()
        rival.randomize(3)
    assert rival.seconds == [0.5]
    loads = [("update_weights_from_ipc", ({"GPU-0": "ipc://a"},)), ("update_weights_from_ipc", ({"GPU-1": "ipc://b"},))]
    assert engine.calls == loads * 2


def test_a_program_that_asks_where_nobody_heeds_is_an_error() -> None:
    with Far(STAND_IN, DENSE, "torch.bfloat16", settings=SETTINGS) as far:
        far.hear()
        with pytest.raises(PeerError, match="far_program asked"):
            far.ask("update")


class ParameterServer:
    """As much of checkpoint-engine's as is called."""

    def __init__(self, **settings: object) -> None:
        self.settings, self.calls = settings, list[str]()

    def init_process_group(self) -> None:
        self.calls.append("group")

    def unregister_checkpoint(self, name: str) -> None:
        self.calls.append(f"unregister {name}")

    def register_checkpoint(self, name: str, *, named_tensors: object, use_shared_memory_pool: bool) -> None:
        self.calls.append(f"register {name}")

    def gather_metas(self, name: str) -> None:
        self.calls.append("metas")

    def update(self, name: str, listen: Callable[[list[tuple[str, str]]], None]) -> None:
        listen([("GPU-0", "ipc://a")])
        self.calls.append("update")


def test_the_server_of_checkpoint_engine_answers_and_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ParameterServer] = []
    ps: Any = ModuleType("checkpoint_engine.ps")

    def make(**settings: object) -> ParameterServer:
        made.append(ParameterServer(**settings))
        return made[0]

    ps.ParameterServer = make
    worker: Any = ModuleType("checkpoint_engine.worker")
    worker.VllmColocateWorkerExtension = type("VllmColocateWorkerExtension", (), {})
    package: Any = ModuleType("checkpoint_engine")
    package.ps, package.worker = ps, worker
    for module in (package, ps, worker):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, moonshot.SERVER, raising=False)
    server = importlib.import_module(moonshot.SERVER)
    monkeypatch.setitem(sys.modules, moonshot.SERVER, server)
    monkeypatch.setattr(models, "make_actor", lambda config, dtype, seed: torch.nn.Linear(2, 2))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ours, theirs = Pipe()
    thread = threading.Thread(target=server.main, args=(os.dup(theirs.fileno()), DENSE, "torch.bfloat16"))
    with ours, theirs:
        thread.start()
        for words in (("register",), ("register",), ("update",), ("heeded",)):
            ours.send_bytes(wire.pack(words))
        said = [cast("tuple[str, Any]", wire.unpack(ours.recv_bytes())) for _ in range(5)]
    thread.join(PATIENCE_S)
    assert [kind for kind, _ in said] == ["done", "done", "done", "asked", "done"]
    assert said[3][1] == {"GPU-0": "ipc://a"}
    assert made[0].calls == [
        "group",
        "register actor",
        "metas",
        "unregister actor",
        "register actor",
        "metas",
        "update",
    ]


class FarAnswers(Far):
    """A far engine that answers with the seed of the weights that it was sent last, through the pipe's format."""

    def __init__(self) -> None:
        self.seed = 1

    def ask(self, operation: str, *arguments: object) -> Any:
        assert operation == "answers"
        return wire.unpack(wire.pack([[self.seed, 7], [self.seed]]))


def test_tokens_of_rivals_are_right_where_they_are_and_wrong_where_they_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = [0]
    monkeypatch.setattr(models, "randomize", lambda actor, seed: seeds.append(seed))
    monkeypatch.setattr(models, "greedy", lambda actor, prompts, new_tokens: [[seeds[-1], 7], [seeds[-1]]])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    far, outcome = FarAnswers(), Outcome(case="vllm-nccl-rivals")

    def send(actor: torch.nn.Module) -> None:
        far.seed = seeds[-1]

    ways = {"sends": send, "sends nothing": lambda actor: None}
    nccl_case.check_rivals(outcome, ways, torch.nn.Linear(1, 1), far)
    assert outcome.checks == {"tokens of sends": True, "tokens of sends nothing": False}


def test_what_an_engine_said_before_is_not_right_again() -> None:
    far, said = FarAnswers(), list[Answers]()
    assert says(far, [[1, 7], [1]], said)
    assert not says(far, [[1, 7], [1]], said)
    far.seed = 2
    assert says(far, [[2, 7], [2]], said)
