"""vLLM as the engine, driven through an `AsyncLLM` object (`vllm.AsyncLLMEngine` is the same class).

An AsyncLLM lives on one event loop of the user's program, where its sockets and tasks are. wsync runs on another thread
(`wsync.sync_async` sees to that) and has every call of the AsyncLLM made on that loop, which goes on all the while.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, ClassVar

from wsync.adapters.engines.vllm_control import Call, VLLMControl, check_extension, is_vllm
from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.errors import ConfigError, EngineStateError, PeerError, SyncTimeout, UnsupportedError, WsyncError

_POLL_S = 0.005
"""Between two looks at requests that are still in flight."""


class AsyncVLLMEngine(VLLMControl):
    """Control of one `AsyncLLM`. Use the AsyncLLM on its event loop as ever, also while a sync runs.

    Methods of this class block: call them on any thread but that of the event loop.
    """

    made_by: ClassVar[str] = "AsyncLLM"
    guarded: ClassVar[tuple[str, ...]] = ("add_request", "generate", "encode")
    """All of it goes through the first; the others would wrap its error in one of vLLM's that says nothing."""

    @staticmethod
    def matches(obj: object) -> bool:
        """True for `AsyncLLM`. Imports nothing."""
        return is_vllm(obj, "AsyncLLM")

    def _connect(self, llm: Any, allow_untested: bool) -> None:
        super()._connect(llm, allow_untested)
        replicas = llm.vllm_config.parallel_config.data_parallel_size
        if replicas != 1:
            raise UnsupportedError(
                f"an AsyncLLM with data_parallel_size={replicas} is not supported; make one AsyncLLM for each replica "
                f"and pass a list of them"
            )
        if llm._client_count != 1:
            raise UnsupportedError(f"an engine core that {llm._client_count} API servers share is not supported")
        check_extension(llm.vllm_config, self.made_by)

    @staticmethod
    def _front(llm: Any) -> Any:
        return llm

    # What WorkerEngine asks for.

    def on_pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """abort: end all requests. wait: let them finish. keep: freeze them, to go on after the sync.

        Whatever the mode, the scheduler runs nothing from then on. What came too late to be refused waits in its queue.
        With "wait", requests that a failed sync left frozen stay so: there are no old weights to finish them with.
        """
        llm = self._llm()
        if mode == "wait" and not self._held:
            requests = llm.output_processor.request_states
            self._run(f"finish {len(requests)} request(s)", lambda: _emptied(requests), deadline)
        how = "abort" if mode == "abort" else "keep"
        try:
            # Caches are dropped at the end of the sync: if it fails before a byte was written, they are still right.
            self._run("pause", lambda: llm.pause_generation(mode=how, clear_cache=False), deadline)
        except SyncTimeout:
            if not self._held:
                self._take_back(llm)
            raise
        self._held = True

    def on_resume(self, deadline: Deadline) -> None:
        """Run requests again."""
        llm = self._llm()
        self._run("go on", llm.resume_generation, deadline)
        self._held = False

    def on_wake_up(self, tags: Sequence[str], deadline: Deadline) -> None:
        """vLLM's `wake_up`. When nothing sleeps any more, vLLM also runs its scheduler again."""
        super().on_wake_up(tags, deadline)
        if self._asleep <= set(tags):
            self._held = False

    # Shared by the above.

    def _take_back(self, llm: Any) -> None:
        """Undo a pause that nobody waits for any more: the engine core answers in the order in which it is asked."""
        with suppress(WsyncError):
            self._start(f"{self.name} to go on", llm.resume_generation)

    def _require_weights(self, doing: str) -> None:
        super()._require_weights(doing)
        if self._asleep or self._held:
            return
        llm = self._llm()
        if self._run("say if it sleeps", llm.is_sleeping, self._patience()):
            raise EngineStateError(
                f"{self.name} was paused or put to sleep by a call of its own and cannot {doing}; await its "
                f"resume_generation() or wake_up() first"
            )

    async def _reset_caches(self, llm: Any) -> None:
        # Frozen requests lose their caches too, and compute them again from the prompt and the tokens so far.
        if not await llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise EngineStateError(f"{self.name} kept its prefix cache, which belongs to the old weights")
        if llm.model_config.is_multimodal_model:
            await llm.reset_encoder_cache()

    async def _release_cache(self, llm: Any) -> None:
        await llm.sleep(level=0)
        try:
            await llm.release_kv_cache_memory()
        except BaseException:
            if not self._held:
                await llm.wake_up(["scheduling"])
            raise

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Call:
        return _LoopCall(name, work, self._loop(self._llm()))

    def _let_go(self, call: Call) -> None:
        assert isinstance(call, _LoopCall)
        call.cancel()

    def _loop(self, llm: Any) -> asyncio.AbstractEventLoop:
        """The event loop that the AsyncLLM lives on. Raises `WsyncError` if nothing can be called there."""
        if llm.errored:
            raise PeerError(
                f"{self.name} cannot be called any more: it was shut down, or its engine core or its event loop has "
                f"ended; start a new AsyncLLM"
            )
        task = llm.engine_core.resources.output_queue_task
        if task is None:
            raise ConfigError(
                f"{self.name} has no event loop yet: make the AsyncLLM in a coroutine, or await something of it, such "
                f"as is_sleeping(), on the loop where it will be used"
            )
        loop: asyncio.AbstractEventLoop = task.get_loop()
        if not loop.is_running():
            raise EngineStateError(
                f"the event loop of {self.name} is not running: await wsync.sync_async(...) on it, or call wsync.sync "
                f"on another thread while it runs"
            )
        if asyncio._get_running_loop() is loop:
            raise EngineStateError(
                f"{self.name} cannot be waited for on the thread of its own event loop; use wsync.sync_async, or "
                f"asyncio.to_thread for other calls"
            )
        return loop


class _LoopCall:
    """A coroutine on an event loop, seen from another thread."""

    def __init__(
        self, name: str, work: Callable[[], Coroutine[Any, Any, Any]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.name = name
        call = _called(work)
        try:
            self._future = asyncio.run_coroutine_threadsafe(call, loop)
        except RuntimeError as error:
            call.close()
            raise EngineStateError(f"the event loop of {name} has ended: {error}") from error

    @property
    def done(self) -> bool:
        return self._future.done()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: callback())

    def result(self, deadline: Deadline) -> Any:
        try:
            return self._future.result(deadline.remaining(self.name))
        except CancelledError:
            raise PeerError(f"the event loop ended, while waiting for {self.name}") from None

    def cancel(self) -> None:
        """vLLM then drops the answer when it comes."""
        self._future.cancel()


async def _called(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return await work()


async def _emptied(requests: Sequence[object]) -> None:
    while requests:
        await asyncio.sleep(_POLL_S)
