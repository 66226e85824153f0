"""What the vLLM adapter says of objects, without vLLM."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from wsync import wire
from wsync.adapters.engines import vllm_reload, vllm_worker
from wsync.adapters.engines.vllm import VLLMEngine
from wsync.adapters.engines.vllm_worker import EXTENSION, VLLMLoader
from wsync.deadline import Deadline
from wsync.errors import ConfigError, EngineStateError, PeerError, SyncTimeout, UnsupportedError
from wsync.plan import Plan, TensorSpec
from wsync.registry import find_engine
from wsync.transports.inproc import InprocTransport
from wsync.worker import Worker


def named(name: str, module: str) -> Any:
    """An object of a class that is called so."""
    return type(name, (), {"__module__": module})()


@pytest.mark.parametrize(
    ("name", "module", "matches"),
    [
        ("LLM", "vllm.entrypoints.llm", True),
        ("AsyncLLM", "vllm.v1.engine.async_llm", False),
        ("LLM", "tensorrt_llm", False),
        ("EngineArgs", "vllm.engine.arg_utils", False),
    ],
)
def test_matches_by_name_and_package(name: str, module: str, matches: bool) -> None:
    assert VLLMEngine.matches(named(name, module)) is matches


def test_a_subclass_of_the_users_own_matches() -> None:
    base = type(named("LLM", "vllm.entrypoints.llm"))
    assert VLLMEngine.matches(type("Mine", (base,), {"__module__": "mine"})())
    assert find_engine(type("Mine", (base,), {"__module__": "mine"})()) is VLLMEngine


def test_another_class_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"llm_engine\.LLMEngine is not supported; use vllm\.LLM"):
        VLLMEngine(named("LLMEngine", "vllm.v1.engine.llm_engine"))


class Core:
    """What the adapter calls of vLLM. Once it hangs every answer waits for `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.callers: list[threading.Thread] = []
        parallel = SimpleNamespace(worker_extension_cls=EXTENSION)
        devices, model = SimpleNamespace(device_type="cpu"), SimpleNamespace(enable_sleep_mode=True)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, device_config=devices, model_config=model)
        self.model_config = SimpleNamespace(is_multimodal_model=False)
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core = object()

    @property
    def llm_engine(self) -> "Core":
        return self

    def get_num_unfinished_requests(self) -> int:
        return 0

    def step(self) -> str:
        return "stepped"

    def answer(self, *args: object, **kwargs: object) -> bool:
        self.callers.append(threading.current_thread())
        assert self.go.wait(30)
        return True

    def is_sleeping(self) -> bool:
        return not self.answer()

    abort_request = collective_rpc = reset_prefix_cache = sleep = wake_up = answer


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    return type("LLM", (Core,), {"__module__": "vllm.entrypoints.llm"})()


def on_gpu(llm: Any, calls: list[object], *, fails: bool = False) -> Any:
    """It says it is on a GPU, and can release its cache; what it is called with is noted."""
    llm.vllm_config.device_config.device_type = "cuda"
    llm.sleep = lambda level: calls.append(f"sleep {level}")
    llm.wake_up = lambda tags: calls.append(f"wake {tags}")

    def release() -> None:
        calls.append("release")
        if fails:
            raise RuntimeError("requires a completed pause first")

    llm.release_kv_cache_memory = release
    return llm


def test_a_worker_of_this_process_has_its_device_as_the_current_one(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """R54: and the level is passed, whatever this version of vLLM would take by itself."""
    calls: list[object] = []
    worker = SimpleNamespace(device=torch.device("cuda", 3))
    on_gpu(llm, calls).model_executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        calls.append(device)
        yield
        calls.append("left")

    monkeypatch.setattr(torch.cuda, "device", current)
    engine = VLLMEngine(llm)
    engine.on_sleep(2, Deadline.after(20))
    engine.on_wake_up(["weights"], Deadline.after(20))
    assert calls == [worker.device, "sleep 2", "left", worker.device, "wake ['weights']", "left"]


def test_an_engine_that_vllm_gave_up_says_what_to_do(llm: Any) -> None:
    """vLLM may say so before any of its processes has ended."""

    class EngineDeadError(Exception):
        pass

    def dead(*args: object, **kwargs: object) -> None:
        raise EngineDeadError("EngineCore encountered an issue")

    llm.reset_prefix_cache = dead
    engine = VLLMEngine(llm)
    for _ in range(2):
        with pytest.raises(PeerError, match=r"EngineDeadError: EngineCore .*; start a new vllm\.LLM"):
            engine.on_reset_cache(Deadline.after(20))


def test_the_cache_is_released_while_the_scheduler_is_stopped(llm: Any) -> None:
    calls: list[object] = []
    engine = VLLMEngine(on_gpu(llm, calls))
    engine.on_release_cache(Deadline.after(20))
    assert calls == ["sleep 0", "release"]


def test_a_cache_that_is_not_released_leaves_the_scheduler_running(llm: Any) -> None:
    calls: list[object] = []
    engine = VLLMEngine(on_gpu(llm, calls, fails=True))
    with pytest.raises(PeerError, match="failed to release its KV cache: RuntimeError: requires a completed pause"):
        engine.on_release_cache(Deadline.after(20))
    assert calls == ["sleep 0", "release", "wake ['scheduling']"]


def test_where_vllm_cannot_release_the_cache_alone(llm: Any) -> None:
    engine = VLLMEngine(llm)
    with pytest.raises(
        UnsupportedError, match=r"vLLM 0\.32\.0 on a CPU cannot release its KV cache and keep its weights"
    ):
        engine.sleep(tags=["kv_cache"])
    calls: list[object] = []
    on_gpu(llm, calls).output_processor.request_states["7"] = object()
    with pytest.raises(EngineStateError, match="1 unfinished request"):
        engine.on_release_cache(Deadline.after(20))
    llm.vllm_config.model_config.enable_sleep_mode = False
    with pytest.raises(ConfigError, match="enable_sleep_mode=True"):
        engine.check_sleep(["kv_cache"])
    del llm.release_kv_cache_memory
    with pytest.raises(UnsupportedError, match=r"vLLM 0\.32\.0 can, on a GPU"):
        engine.check_sleep(["kv_cache"])
    assert calls == []


def freeze(engine: VLLMEngine, llm: Core) -> None:
    llm.go.set()
    llm.output_processor.request_states["7"] = object()
    engine.on_pause("keep", Deadline.after(20))
    llm.go.clear()


def pause(mode: Any) -> Callable[[VLLMEngine, Core, Deadline], None]:
    def call(engine: VLLMEngine, llm: Core, deadline: Deadline) -> None:
        llm.output_processor.request_states["7"] = object()
        engine.on_pause(mode, deadline)

    return call


def resume(engine: VLLMEngine, llm: Core, deadline: Deadline) -> None:
    freeze(engine, llm)
    engine.on_resume(deadline)


@pytest.mark.parametrize(
    "call",
    [
        pause("abort"),
        pause("keep"),
        resume,
        lambda engine, llm, deadline: engine.on_reset_cache(deadline),
        lambda engine, llm, deadline: engine.on_sleep(1, deadline),
        lambda engine, llm, deadline: engine.on_wake_up(["weights"], deadline),
        lambda engine, llm, deadline: engine.call("hello", b"", deadline.timeout_s),
    ],
    ids=["abort", "keep", "resume", "reset cache", "sleep", "wake up", "call"],
)
def test_a_hung_engine_core_is_given_up_and_left_alone_until_it_answers(
    call: Callable[[VLLMEngine, Core, Deadline], None], llm: Core
) -> None:
    engine = VLLMEngine(llm)
    llm.go.clear()
    with pytest.raises(SyncTimeout, match=r"gave up after 0\.2 s: still waiting for vLLM 0\.32\.0 to "):
        call(engine, llm, Deadline.after(0.2))
    for use in (llm.step, lambda: engine.on_reset_cache(Deadline.after(20))):
        with pytest.raises(EngineStateError, match="has not answered yet"):  # or two threads would use its socket
            use()
    unanswered = engine._call
    assert unanswered is not None
    llm.go.set()
    unanswered.result(Deadline.after(20))
    assert llm.step() == "stepped"
    assert "step" not in vars(llm), "the guard is still there"
    engine.on_reset_cache(Deadline.after(20))


def test_a_session_that_ends_on_another_thread_leaves_the_engine_alone(llm: Core) -> None:
    """Also if that thread has the number of the one that synced, which has ended."""
    engine = VLLMEngine(llm)
    syncing = threading.Thread(target=engine.on_pause, args=("wait", Deadline.after(20)))
    syncing.start()
    syncing.join()
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join()
    engine.close()
    assert llm.callers == []


def test_requests_that_nobody_works_on_are_refused_with_what_to_do(llm: Core) -> None:
    llm.output_processor.request_states["7"] = object()
    with pytest.raises(EngineStateError, match=r"1 unfinished.*wait_for_completion\(\) first.*'abort'.*'keep'"):
        VLLMEngine(llm).pause("wait", Deadline.after(20))
    assert llm.step() == "stepped", "after a refusal nothing is paused"


class Held(nn.Module):
    """A model that vLLM holds: one parameter, and what its loader was given last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.given: list[torch.Tensor] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.given.append(tensor)
            self.weight.copy_(tensor)


class VLLMWorker:
    """vLLM's own worker, as far as the loader looks at it."""

    def __init__(self) -> None:
        self.model, self.device = Held(), torch.device("cpu")
        self.model_config = SimpleNamespace(model="nowhere")
        self.load_config = SimpleNamespace(load_format="dummy")
        self.vllm_config = SimpleNamespace(lora_config=None)

    def get_model(self) -> Held:
        return self.model


@pytest.fixture
def vllms_worker(llm: Any, monkeypatch: pytest.MonkeyPatch) -> VLLMWorker:
    monkeypatch.setattr(VLLMLoader, "_context", lambda self: torch.no_grad())
    monkeypatch.setattr(vllm_reload, "repacked", lambda model: [])
    monkeypatch.setattr(vllm_worker, "_attention_layers", lambda model: [])
    return VLLMWorker()


def test_a_parameter_that_moved_stays_an_error_until_somebody_connects_anew(vllms_worker: VLLMWorker) -> None:
    worker = vllm_worker.worker_of(vllms_worker, 0)
    loader, weight = worker._loader, vllms_worker.model.weight
    specs = [TensorSpec(name="weight", shape=(4, 3), dtype=torch.float32)]

    def connect() -> None:
        assert isinstance(reply := wire.unpack(worker.handle("describe", wire.pack({"specs": specs}))), dict)
        assert reply["ok"]["manifest"].problems == ()

    connect()
    loader.begin()
    loader.finish()
    loader.begin()
    weight.data = weight.data.clone()
    with pytest.raises(EngineStateError, match=r"moved 1 parameter\(s\) while it loaded: weight"):
        loader.finish()
    for _ in range(2):
        with pytest.raises(EngineStateError, match=r"moved 1 parameter\(s\) since it was connected: weight.*restart"):
            loader.begin()
    connect()
    loader.begin()
    loader.finish()


def test_a_parameter_of_another_layout_where_it_lay_is_not_published_with_the_old_one(
    vllms_worker: VLLMWorker,
) -> None:
    worker, weight = vllm_worker.worker_of(vllms_worker, 0), vllms_worker.model.weight
    plan = Plan.pack([TensorSpec(name="weight", shape=(4, 3), dtype=torch.float32)], 4096)
    ask(worker, "describe", specs=list(plan.specs))
    sender = InprocTransport().sender(slot_bytes=4096, num_slots=1, receivers=1, generation=1)
    ask(worker, "attach", plan=plan, tickets=[sender.ticket()], first_index=0, timeout_s=5.0)
    news = torch.randn(4, 3)

    def sync(version: int) -> None:
        sender.hand_over(plan.buckets[0], [news])
        attempt = {"version": version, "attempt": str(version), "timeout_s": 5.0}
        ask(worker, "update", digest=False, **attempt)
        ask(worker, "publish", **attempt)

    sync(1)
    assert torch.equal(weight, news)
    weight.data = weight.data.t()
    with pytest.raises(AssertionError, match=r"replaced 1 tensor\(s\) since it was connected: weight"):
        sync(2)
    assert worker.state.kind == "torn"


def ask(worker: Worker, method: str, **message: object) -> None:
    reply = wire.unpack(worker.handle(method, wire.pack(message)))
    assert isinstance(reply, dict)
    assert "ok" in reply, reply["error"]["message"]


def test_a_reload_is_given_what_arrived_without_another_copy(
    vllms_worker: VLLMWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_reload, "repacked", lambda model: ["weight"])
    monkeypatch.setattr(vllm_reload, "StandIns", lambda model: SimpleNamespace(placed=lambda model: nullcontext()))
    monkeypatch.setattr(vllm_reload, "begin", lambda model: None)
    loader, arrived = VLLMLoader(vllms_worker), torch.randn(4, 3)
    loader.begin()
    loader.load_weights([("weight", arrived)])
    assert vllms_worker.model.given[0] is arrived


@pytest.mark.parametrize("end", ["finish", "rollback"])
def test_a_reload_ends_when_its_device_is_done(
    vllms_worker: VLLMWorker, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Nobody else waits: its targets are stand-ins in host memory."""
    done: list[str] = []
    for name in ("begin", "finish", "rollback"):
        monkeypatch.setattr(vllm_reload, name, lambda *args, name=name: done.append(name))
    monkeypatch.setattr(vllm_reload, "repacked", lambda model: ["weight"])
    monkeypatch.setattr(vllm_reload, "StandIns", lambda model: None)
    monkeypatch.setattr(VLLMLoader, "wait_for_device", lambda self: done.append("waited"))
    loader = VLLMLoader(vllms_worker)
    monkeypatch.setattr(VLLMLoader, "repacked", True)
    loader.begin()
    getattr(loader, end)()
    assert done == ["begin", end, "waited"]
