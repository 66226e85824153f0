"""What wsync asks of an `sglang.Engine`: coroutines of its tokenizer manager, each with a deadline.

They run on the engine's own event loop: here, or, if the user's program runs it on another thread, over there.
"""

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from inspect import signature
from typing import Any, TypeVar

from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.errors import EngineStateError, PeerError, SyncTimeout, UnsupportedError, WsyncError

T = TypeVar("T")

_POLL_S = 0.005
"""Between two looks at requests that are still in flight, or two attempts to drop a cache."""


class Calls:
    """Control of one engine, which is held weakly. One call at a time.

    Attributes:
        name: the engine's, for messages.
        paused: whether the scheduler was told to run no batch.
        lifelines: what becomes readable when a process of the engine ends -> its id.
    """

    def __init__(self, engine: Any, name: str) -> None:
        """`engine` has been started."""
        self._engine_ref, self.name = weakref.ref(engine), name
        self._open: asyncio.Future[Any] | None = None
        self._doing = ""
        self.paused = False
        self.lifelines: dict[int, int] = {os.pidfd_open(pid): pid for pid in engine.get_all_child_pids()}
        weakref.finalize(self, _close_all, self.lifelines)

    @property
    def engine(self) -> Any:
        """The engine. Raises `EngineStateError` if it was shut down."""
        engine = self.alive()
        if engine is None:
            raise EngineStateError(f"{self.name} was shut down; start a new sglang.Engine")
        return engine

    def alive(self) -> Any | None:
        """The engine, None if it was shut down."""
        engine = self._engine_ref()
        return engine if engine is not None and engine.send_to_rpc is not None else None

    def in_flight(self) -> Sequence[str]:
        """Ids of requests that are not finished."""
        return list(self.engine.tokenizer_manager.rid_to_state)

    def run(self, doing: str, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None) -> T:
        """`await work()` on the engine's loop. Raises `PeerError`, `SyncTimeout`; then the call is still open.

        While a call is open the next one waits for it, and raises `EngineStateError` if it does not end.
        """
        loop = self.engine.loop
        if asyncio._get_running_loop() is not None:
            raise EngineStateError(f"{self.name} cannot be asked to {doing} on a thread that runs an event loop")
        call = self._guarded(doing, work, timeout_s)
        try:
            if not loop.is_running():
                return loop.run_until_complete(call)  # type: ignore[no-any-return]
            future = asyncio.run_coroutine_threadsafe(call, loop)
            return future.result(None if timeout_s is None else timeout_s + 1.0)
        except WsyncError:
            raise
        except FutureTimeout:
            raise SyncTimeout(f"gave up after {timeout_s:g} s: {self.name} ran no loop to {doing}") from None
        except Exception as error:
            raise PeerError(f"{self.name} failed to {doing}: {type(error).__name__}: {error}") from error

    async def _guarded(self, doing: str, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None) -> T:
        loop = asyncio.get_running_loop()
        died: asyncio.Future[int] = loop.create_future()

        def ended(pid: int) -> None:
            if not died.done():
                died.set_result(pid)

        for lifeline, pid in self.lifelines.items():
            loop.add_reader(lifeline, ended, pid)
        try:
            if self._open is not None and not self._open.done():
                await asyncio.wait({self._open, died}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not self._open.done():
                    raise EngineStateError(f"{self.name} has not answered yet: still waiting for it to {self._doing}")
            self._open, self._doing = asyncio.ensure_future(work()), doing
            self._open.add_done_callback(_heard)
            await asyncio.wait({self._open, died}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._open.done():
                return self._open.result()  # type: ignore[no-any-return]
            if died.done():
                raise PeerError(f"{self.name} died: its process {died.result()} ended, while it was to {doing}")
            raise SyncTimeout(f"gave up after {timeout_s:g} s: still waiting for {self.name} to {doing}")
        finally:
            for lifeline in self.lifelines:
                loop.remove_reader(lifeline)

    def settle(self, mode: PauseMode, deadline: Deadline) -> None:
        """Have no batch running any more: requests are ended, finished, or put back in the queue without their caches.

        Raises `UnsupportedError`, with nothing changed, if SGLang cannot drop caches while requests wait.
        """
        kept = self.in_flight() if mode == "keep" else ()
        if kept and not self.can_keep():
            raise UnsupportedError(
                f"{self.name} has {len(kept)} unfinished request(s), and this version cannot drop its "
                f"caches while requests wait; sync with pause='wait' or pause='abort', or use SGLang 0.5.23"
            )
        if mode != "keep" and not (mode == "wait" and self.paused):
            doing = f"be through with its requests ({mode})"
            # A little longer than it gives itself: nothing of it may go on, and end requests, when nobody waits for it.
            self.run(doing, lambda: self._drain(mode, deadline), deadline.remaining(doing) + 1.0)
        if self.paused:
            return
        self.run("pause", lambda: self._pause(), deadline.remaining(f"{self.name} to pause"))
        self.paused = True
        if kept:
            try:
                self.flush(deadline)  # nobody answers a pause; what comes after it on the same way is answered
            except BaseException:
                with suppress(WsyncError):
                    self.go_on(Deadline.after(deadline.timeout_s))
                raise

    def go_on(self, deadline: Deadline) -> None:
        """Run batches again."""
        if self.paused:
            self.run("go on", lambda: self._continue(), deadline.remaining(f"{self.name} to go on"))
            self.paused = False

    def flush(self, deadline: Deadline) -> None:
        """Drop every cached prefix. SGLang refuses while the last batch is not quite over: it is asked again."""
        manager = self.engine.tokenizer_manager

        async def flushed() -> None:
            while not (await manager.flush_cache()).success:
                await asyncio.sleep(_POLL_S)
                deadline.remaining(f"{self.name} to drop its caches")

        self.run("drop its caches", flushed, deadline.remaining(f"{self.name} to drop its caches"))

    def release(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Release the memory of `tags`. The engine must have nothing to do, else SGLang ends itself."""
        request = self.request("ReleaseMemoryOccupationReqInput", tags=_with_graphs(tags))
        manager = self.engine.tokenizer_manager
        self.run("sleep", lambda: manager.release_memory_occupation(request, None), deadline.remaining("sleep"))

    def restore(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Take the memory of `tags` back. All of them must be released, else SGLang ends itself."""
        request = self.request("ResumeMemoryOccupationReqInput", tags=_with_graphs(tags))
        manager = self.engine.tokenizer_manager
        self.run("wake up", lambda: manager.resume_memory_occupation(request, None), deadline.remaining("wake up"))

    def can_keep(self) -> bool:
        """Whether this SGLang drops its caches while paused requests wait in the queue."""
        import sglang.srt.managers.scheduler as module

        return "ignore_waiting" in signature(module.Scheduler.is_fully_idle).parameters

    async def _drain(self, mode: PauseMode, deadline: Deadline) -> None:
        manager = self.engine.tokenizer_manager
        manager.auto_create_handle_loop()
        while manager.rid_to_state:
            deadline.remaining(f"{len(manager.rid_to_state)} request(s) of {self.name} to end")
            if mode == "abort":  # again and again: one may just be on its way
                manager.abort_request(abort_all=True)
            await asyncio.sleep(_POLL_S)

    async def _pause(self) -> None:
        await self.engine.tokenizer_manager.pause_generation(self.request("PauseGenerationReqInput", mode="retract"))

    async def _continue(self) -> None:
        request = self.request("ContinueGenerationReqInput", torch_empty_cache=False)
        await self.engine.tokenizer_manager.continue_generation(request)

    def request(self, kind: str, **fields: object) -> Any:
        """One of SGLang's messages."""
        import sglang.srt.managers.io_struct as module

        return getattr(module, kind)(**fields)


def _with_graphs(tags: Sequence[str]) -> list[str]:
    """What captured graphs hold serves generation alone: it goes and comes with the KV cache.

    It is there to go if SGLang was started with SGLANG_MEMORY_SAVER_CUDA_GRAPH=1; else the tag names nothing.
    """
    return [*tags, "cuda_graph"] if "kv_cache" in tags else list(tags)


class Updates:
    """SGLang's own update calls, with the session that newer versions want around them.

    They are made past SGLang's lock, which a request holds as long as its reader has not taken all of it: wsync sees to
    it that no batch runs while weights change.
    """

    def __init__(self, calls: Calls, workers: int) -> None:
        """Every one of `workers` ranks is sent tensors of its own."""
        self._calls, self._workers = calls, workers
        self._in_session = False

    def begin(self, timeout_s: float) -> None:
        """Open a session, where this SGLang has sessions; one that could not be ended before is ended first."""
        self.end(timeout_s)
        if hasattr(self._calls.engine.tokenizer_manager, "begin_weight_update"):
            self._call("begin_weight_update", self._calls.request("BeginWeightUpdateReqInput"), timeout_s)
            self._in_session = True

    def end(self, timeout_s: float) -> None:
        """Close the session if one is open."""
        if self._in_session:
            self._call("end_weight_update", self._calls.request("EndWeightUpdateReqInput"), timeout_s)
            self._in_session = False

    def send(self, tensors: object, load_format: str, timeout_s: float | None) -> None:
        """One update call, in a format that SGLang knows. `timeout_s` None: as long as it takes."""
        from sglang.srt.utils import MultiprocessingSerializer

        request = self._calls.request(
            "UpdateWeightsFromTensorReqInput",
            serialized_named_tensors=[MultiprocessingSerializer.serialize(tensors) for _ in range(self._workers)],
            load_format=load_format,
            flush_cache=False,
        )
        self._call("update_weights_from_tensor", request, timeout_s)

    def _call(self, method: str, request: object, timeout_s: float | None) -> None:
        manager = self._calls.engine.tokenizer_manager

        async def answers() -> Sequence[Any]:
            manager.auto_create_handle_loop()
            return await getattr(manager, f"{method}_communicator")(request)  # type: ignore[no-any-return]

        failed = [answer.message for answer in self._calls.run(method, answers, timeout_s) if not answer.success]
        if failed:
            raise PeerError(f"{self._calls.name} failed in {method}: {failed[0]}")


def _heard(call: "asyncio.Future[Any]") -> None:
    """Look at the outcome, which may come when nobody waits any more."""
    if not call.cancelled():
        call.exception()


def _close_all(descriptors: Mapping[int, int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
