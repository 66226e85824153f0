"""vLLM as the engine, driven through a `vllm.LLM` object.

Three ways to run it are served: everything in the caller's process (VLLM_ENABLE_V1_MULTIPROCESSING=0), the same under
torchrun with distributed_executor_backend="external_launcher" (every rank owns an engine and drives its own worker),
and the default, with an engine-core process and worker processes. The last needs the worker extension.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, ClassVar

import torch

from wsync.adapters.engines.vllm_control import Call, VLLMControl, check_extension, is_vllm
from wsync.adapters.engines.vllm_worker import worker_of
from wsync.background import Background
from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.errors import EngineStateError, SyncTimeout, WsyncError
from wsync.plan import TensorSpec
from wsync.protocols import Manifest

_QUICK = ("hello", "publish", "abort")
"""Calls of a worker that wait for its device at most, until their deadline: another thread would only delay them."""


class VLLMEngine(VLLMControl):
    """Control of one `vllm.LLM`. It is for one thread at a time: do not use it on another one while a sync runs.

    Under external_launcher with tensor parallelism each rank's engine has one worker, which holds a part of the
    model: every rank must pass its own LLM to the same sync.
    """

    made_by: ClassVar[str] = "vllm.LLM"
    guarded: ClassVar[tuple[str, ...]] = ("add_request", "step")
    """generate, chat, enqueue, encode, beam search and the rest all go through these two."""

    @staticmethod
    def matches(obj: object) -> bool:
        """True for `vllm.LLM`. Imports nothing."""
        return is_vllm(obj, "LLM")

    def _connect(self, llm: Any, allow_untested: bool) -> None:
        super()._connect(llm, allow_untested)
        self._call: Background[Any] | None = None
        self._calling = threading.Lock()
        self._thread = threading.current_thread()  # not its number, which the next thread may get
        if local_worker(llm) is None:
            other_way = "; or set VLLM_ENABLE_V1_MULTIPROCESSING=0 to run it here"
            check_extension(llm.llm_engine.vllm_config, self.made_by, other_way)

    @staticmethod
    def _front(llm: Any) -> Any:
        return llm.llm_engine

    # What WorkerEngine asks for.

    @property
    def resets_cache_meanwhile(self) -> bool:
        """In one process: there the scheduler, which is paused, and the worker have nothing in common."""
        return local_worker(self._llm()) is not None

    def call(self, method: str, payload: bytes, timeout_s: float | None) -> Sequence[bytes]:
        """Run `Worker.handle(method, payload)` on every worker; replies in rank order. Raises as its base."""
        local = local_worker(self._llm())
        if local is None:
            return super().call(method, payload, timeout_s)
        if timeout_s is None or method in _QUICK:
            return [worker_of(local, 0).handle(method, payload)]
        deadline = Deadline.after(timeout_s)
        return [self._run(f"answer {method!r}", lambda: worker_of(local, 0).handle(method, payload), deadline)]

    @property
    def replica(self) -> str:
        """Under external_launcher with tensor parallelism the same on the ranks that hold parts of one model."""
        llm = self._llm()
        parallel, local = llm.llm_engine.vllm_config.parallel_config, local_worker(llm)
        if local is None or parallel.distributed_executor_backend != "external_launcher" or parallel.world_size == 1:
            return super().replica
        return f"{llm.model_config.model}, ranks from {local.rank // parallel.world_size * parallel.world_size}"

    def describe(self, specs: Sequence[TensorSpec], deadline: Deadline) -> Sequence[Manifest]:
        """Dry-run the loader of every worker on `specs`. Nothing is written."""
        self._thread = threading.current_thread()
        return super().describe(specs, deadline)

    def close(self, address: str | None = None) -> None:
        """Let the workers drop the receivers attached at `address` (None: any). The engine stays. Never raises.

        Workers are told only on the thread of the last sync: on another one the LLM may be in use at the same time, and
        two threads on its socket to the engine core end the process. They then drop them at the next sync.
        """
        if self._llm_ref() is not None and threading.current_thread() is self._thread:
            super().close(address)

    def abort(self, attempt: str, reason: str, deadline: Deadline, *, tear: bool = False) -> None:
        """End an attempt. If the old version still serves, requests that were frozen for it go on. Never raises."""
        super().abort(attempt, reason, deadline, tear=tear)
        if self._reason_not_to_serve() is None:
            with suppress(WsyncError):
                self.on_resume(self._patience())

    def on_pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """End or freeze requests that were added and not finished.

        vLLM's `LLM` only works on requests while one of its methods runs, and hands each output out once. So
        there is nobody to wait for, and to work on them here would lose their outputs: with "wait", unfinished requests
        are an error.
        """
        self._thread = threading.current_thread()
        engine = self._llm().llm_engine
        unfinished = list(engine.output_processor.request_states)
        if unfinished and mode == "wait" and not self._held:
            raise EngineStateError(
                f"{self.name} has {len(unfinished)} unfinished request(s), which nobody works on while it is synced; "
                f"call llm.wait_for_completion() first, which returns their outputs, or sync with pause='abort' to end "
                f"them, or with pause='keep' to go on with them under the new weights"
            )
        if unfinished and mode == "abort":
            self._run("abort its requests", lambda: engine.abort_request(unfinished, internal=True), deadline)
        elif unfinished and not self._held:
            # Between calls the engine core goes on with them by itself: it must not, from old caches.
            self._held = True
            try:
                self._run("freeze its requests", lambda: engine.sleep(level=0, mode="keep"), deadline)
            except SyncTimeout:
                raise  # it may freeze them yet
            except BaseException:
                self._held = False
                raise

    def on_resume(self, deadline: Deadline) -> None:
        """Go on with requests that were frozen."""
        if self._held:
            engine = self._llm().llm_engine
            self._run("go on", lambda: engine.wake_up(["scheduling"]), deadline)
            self._held = False

    # Shared by the above.

    def _require_weights(self, doing: str) -> None:
        super()._require_weights(doing)
        if not self._asleep and not self._held and self._was_put_to_sleep():
            raise EngineStateError(
                f"{self.name} was put to sleep by llm.sleep and cannot {doing}; call llm.wake_up() first"
            )

    def _was_put_to_sleep(self) -> bool:
        engine = self._llm().llm_engine
        executor = getattr(engine, "model_executor", None)
        if executor is not None:
            return "weights" in executor.sleeping_tags
        # Another process knows which tags sleep, and only says whether there are any.
        return bool(self._run("say if it sleeps", engine.is_sleeping, self._patience()))

    def _reset_caches(self, llm: Any) -> None:
        engine = llm.llm_engine
        running = engine.get_num_unfinished_requests() > 0
        if not llm.reset_prefix_cache(reset_running_requests=running, reset_connector=True):
            raise EngineStateError(f"{self.name} kept its prefix cache, which belongs to the old weights")
        if llm.model_config.is_multimodal_model:
            engine.reset_encoder_cache()
            if not running:
                llm.reset_mm_cache()

    def _release_cache(self, llm: Any) -> None:
        llm.sleep(level=0)
        try:
            llm.release_kv_cache_memory()
        except BaseException:
            llm.wake_up(["scheduling"])
            raise

    def _reason_not_to_serve(self) -> str | None:
        reason = super()._reason_not_to_serve()
        return reason if reason is not None or self._call is None or self._call.done else self._unanswered(self._call)

    def _start(self, name: str, work: Callable[[], Any]) -> Call:
        """On a thread of its own, one call at a time: the sockets of an LLM are for one thread."""
        with self._calling:
            if self._call is not None and not self._call.done:
                raise EngineStateError(self._unanswered(self._call))
            self._call = Background(name, partial(_on_its_device, local_worker(self._llm()), work))
            return self._call

    def _let_go(self, call: Call) -> None:
        """The LLM is guarded until the call has ended."""
        self.guard(self._reason_not_to_serve())

    def _unanswered(self, call: Call) -> str:
        return f"{self.name} has not answered yet: still waiting for {call.name}"


def _on_its_device(worker: Any | None, work: Callable[[], Any]) -> Any:
    """What `work()` comes to. On a fresh thread the first device is the current one, whichever `worker` is on.

    vLLM's worker waits for the current device before it unmaps memory.
    """
    with nullcontext() if worker is None or worker.device.type == "cpu" else torch.cuda.device(worker.device):
        return work()


def local_worker(llm: Any) -> Any | None:
    """vLLM's worker object if it lives in this process."""
    executor = getattr(llm.llm_engine, "model_executor", None)
    wrapper = getattr(executor, "driver_worker", None)
    return getattr(wrapper, "worker", None)
