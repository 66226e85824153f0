"""What the adapter for `AsyncLLM` does on event loops, without vLLM."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from wsync.adapters.engines.vllm_async import AsyncVLLMEngine
from wsync.adapters.engines.vllm_worker import EXTENSION
from wsync.deadline import Deadline
from wsync.errors import ConfigError, EngineStateError, PeerError, SyncTimeout, UnsupportedError
from wsync.registry import find_engine


class Fake:
    """What the adapter calls of an `AsyncLLM`. Once it hangs every answer waits for `go`."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.calls: list[str] = []
        self.asked = threading.Event()
        self.errored = False
        self._client_count = 1
        parallel = SimpleNamespace(worker_extension_cls=EXTENSION, data_parallel_size=1)
        devices, model = SimpleNamespace(device_type="cpu"), SimpleNamespace(enable_sleep_mode=True)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, device_config=devices, model_config=model)
        self.model_config = SimpleNamespace(is_multimodal_model=False)
        self.output_processor = SimpleNamespace(request_states={})
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=None, output_queue_task=None))

    async def live(self) -> None:
        """Tie it to the event loop that runs."""
        self.engine_core.resources.output_queue_task = asyncio.current_task()

    async def _answer(self, call: str) -> bool:
        self.calls.append(call)
        self.asked.set()
        await self.go.wait()
        return True

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert not clear_cache, "a sync that writes nothing would cost a kept request its caches"
        await self._answer(f"pause {mode}")

    async def resume_generation(self) -> None:
        await self._answer("resume")

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        return await self._answer("reset")

    async def is_sleeping(self) -> bool:
        return not await self._answer("is sleeping")

    def generate(self) -> str:
        return "an answer"


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(20)

    def stop(self) -> None:
        """End what runs there, as `asyncio.run` does, and then the loop."""
        if self.loop.is_closed():
            return
        for task in self.run(self._tasks()):
            self.loop.call_soon_threadsafe(task.cancel)
        self.run(self._tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(20)
        self.loop.close()

    async def _tasks(self) -> list[Any]:
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.stop()


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An AsyncLLM that nobody has awaited yet."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    return type("AsyncLLM", (Fake,), {"__module__": "vllm.v1.engine.async_llm"})()


@pytest.fixture
def llm(unused: Any, loop: Loop) -> Any:
    loop.run(unused.live())
    return unused


def soon(timeout_s: float = 20.0) -> Deadline:
    return Deadline.after(timeout_s)


def test_the_registry_finds_it(unused: Any) -> None:
    assert find_engine(unused) is AsyncVLLMEngine


def test_it_must_have_a_loop_and_the_loop_must_run(unused: Any, loop: Loop) -> None:
    with pytest.raises(ConfigError, match="has no event loop yet: make the AsyncLLM in a coroutine"):
        AsyncVLLMEngine(unused).on_resume(soon())
    loop.run(unused.live())
    loop.stop()
    with pytest.raises(EngineStateError, match=r"is not running: await wsync\.sync_async"):
        AsyncVLLMEngine(unused).on_resume(soon())
    unused.errored = True
    with pytest.raises(PeerError, match="it was shut down, or its engine core or its event loop has ended"):
        AsyncVLLMEngine(unused).on_resume(soon())


def test_several_replicas_or_servers_are_refused(unused: Any) -> None:
    unused.vllm_config.parallel_config.data_parallel_size = 2
    with pytest.raises(UnsupportedError, match="data_parallel_size=2 is not supported; make one AsyncLLM for each"):
        AsyncVLLMEngine(unused)
    unused.vllm_config.parallel_config.data_parallel_size = 1
    unused._client_count = 3
    with pytest.raises(UnsupportedError, match="3 API servers share"):
        AsyncVLLMEngine(unused)


def test_on_the_thread_of_the_loop_nothing_is_waited_for(llm: Any, loop: Loop) -> None:
    async def call() -> None:
        with pytest.raises(EngineStateError, match=r"on the thread of its own event loop; use wsync\.sync_async"):
            AsyncVLLMEngine(llm).on_resume(soon())

    loop.run(call())


@pytest.mark.parametrize(
    "call",
    [
        lambda engine, deadline: engine.on_resume(deadline),
        lambda engine, deadline: engine.on_reset_cache(deadline),
        lambda engine, deadline: engine.on_pause("abort", deadline),
    ],
    ids=["resume", "reset cache", "pause"],
)
def test_an_answer_that_never_comes_is_given_up_and_is_in_nobodys_way(
    call: Callable[[AsyncVLLMEngine, Deadline], None], llm: Any, loop: Loop
) -> None:
    engine = AsyncVLLMEngine(llm)
    llm.go.clear()
    with pytest.raises(SyncTimeout, match=r"gave up after 0\.2 s: still waiting for vLLM 0\.32\.0 to "):
        call(engine, soon(0.2))
    loop.loop.call_soon_threadsafe(llm.go.set)
    call(engine, soon())


def test_a_pause_that_is_given_up_is_taken_back(llm: Any, loop: Loop) -> None:
    engine = AsyncVLLMEngine(llm)
    llm.go.clear()
    with pytest.raises(SyncTimeout):
        engine.on_pause("keep", soon(0.2))
    loop.loop.call_soon_threadsafe(llm.go.set)
    engine.on_reset_cache(soon())
    assert llm.calls == ["pause keep", "resume", "reset"]


def test_a_pause_lets_requests_finish_unless_they_are_frozen(llm: Any, loop: Loop) -> None:
    engine = AsyncVLLMEngine(llm)
    llm.output_processor.request_states["7"] = object()
    with pytest.raises(SyncTimeout, match=r"to finish 1 request\(s\)"):
        engine.on_pause("wait", soon(0.2))
    engine.on_pause("keep", soon())
    engine.on_pause("wait", soon())
    assert llm.calls == ["pause keep", "pause keep"], "on torn weights nothing may be finished"


def test_a_loop_that_ends_is_noticed(llm: Any, loop: Loop) -> None:
    llm.go.clear()
    engine = AsyncVLLMEngine(llm)

    def end() -> None:
        assert llm.asked.wait(20)
        loop.stop()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(PeerError, match=r"the event loop ended, while waiting for vLLM 0\.32\.0 to go on"):
        engine.on_resume(soon())
    ending.join(20)


def test_requests_are_refused_between_pause_and_resume(llm: Any) -> None:
    engine = AsyncVLLMEngine(llm)
    engine.pause("abort", soon())
    with pytest.raises(EngineStateError, match="paused for a sync"):
        llm.generate()
    engine.resume()
    assert llm.generate() == "an answer"
    assert not set(AsyncVLLMEngine.guarded) & vars(llm).keys()
