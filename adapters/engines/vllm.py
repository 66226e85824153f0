"""vLLM as the engine, driven through a `vllm.LLM` object.

Three ways to run are served: everything in the caller's process (VLLM_ENABLE_V1_MULTIPROCESSING=0), the same under
torchrun with distributed_executor_backend="external_launcher" (every rank owns an engine and drives its own worker),
and the default, with an engine-core process and worker processes. The last needs the worker extension.
"""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from socket import socketpair
from typing import Any, TypeVar

from wsync.adapters.engines.vllm_worker import EXTENSION, worker_of
from wsync.background import Background
from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.engine import WorkerEngine
from wsync.errors import ConfigError, EngineStateError, PeerError, SyncTimeout, UnsupportedError, WsyncError
from wsync.plan import TensorSpec
from wsync.protocols import Manifest
from wsync.topology import Endpoint

SUPPORTED_VERSIONS = ("0.26.0", "0.32.0")
"""The tests run 0.32.0. Of 0.26.0 what is used here was compared with it in the source, and has not been run."""

T = TypeVar("T")


# An engine lives as long as its LLM: what one session left behind, torn say, must be known to the next one.
_engines: "weakref.WeakKeyDictionary[Any, VLLMEngine]" = weakref.WeakKeyDictionary()


class VLLMEngine(WorkerEngine):
    """Control of one `vllm.LLM`, which is held weakly. Every call of the LLM that adds or runs requests is guarded.

    An LLM is for one thread at a time: do not use it on another one while a sync runs.

    Under external_launcher with tensor parallelism each rank's engine has one worker, which holds a part of the
    model: every rank must pass its own LLM to the same sync.
    """

    @staticmethod
    def matches(obj: object) -> bool:
        """True for the engine classes of vLLM. Imports nothing."""
        return _is_vllm(obj, "LLM") or _is_vllm(obj, "AsyncLLM")

    def __new__(cls, llm: Any, *, allow_untested: bool = False) -> "VLLMEngine":
        """The engine of `llm`, made by the first call; see `__init__`."""
        if not _is_vllm(llm, "LLM"):
            raise UnsupportedError(f"{type(llm).__module__}.{type(llm).__qualname__} is not supported; use vllm.LLM")
        engine = _engines.get(llm)
        if engine is None:
            engine = super().__new__(cls)
            engine._connect(llm, allow_untested)
            _engines[llm] = engine
        return engine

    def __init__(self, llm: Any, *, allow_untested: bool = False) -> None:
        """Args:
            llm: a `vllm.LLM`. The same one gives the same engine.
            allow_untested: take a version of vLLM that is not in `SUPPORTED_VERSIONS`.

        Raises:
            UnsupportedError: the engine class or the version is not supported.
            ConfigError: the LLM runs its workers in other processes and was made without the worker extension.
        """
        # All is done in __new__: this runs on every VLLMEngine(llm), also on one that is in use.

    def _connect(self, llm: Any, allow_untested: bool) -> None:
        super().__init__()
        self.name = f"vLLM {_check_version(allow_untested)}"
        self._llm_ref = weakref.ref(llm)
        self._call: Background[Any] | None = None
        self._calling = threading.Lock()
        self._held = False
        self._thread = threading.current_thread()  # not its number, which the next thread may get
        self._dead: str | None = None
        self._pidfds: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._pidfds)
        if _local_worker(llm) is None:
            _check_extension(llm)

    # What WorkerEngine asks for.

    def call(self, method: str, payload: bytes, timeout_s: float | None) -> Sequence[bytes]:
        """Run `Worker.handle(method, payload)` on every worker; replies in rank order. Raises as its base."""
        llm = self._llm()
        local, doing = _local_worker(llm), f"answer {method!r}"
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        if local is not None:
            return [self._run(doing, lambda: worker_of(local, 0).handle(method, payload), deadline)]
        return self._run(doing, lambda: llm.collective_rpc("wsync_call", args=(method, payload)), deadline)

    def guard(self, reason: str | None) -> None:
        """Refuse to add or run requests with `EngineStateError(reason)`; None: leave no trace of that."""
        llm = self._llm_ref()
        if llm is None:
            return
        # generate, chat, enqueue, encode, beam search and the rest all go through these two.
        entries = vars(llm.llm_engine)
        for name in ("add_request", "step"):
            found = entries.pop(name, None)
            hidden = found.hides if isinstance(found, _Refusal) else found
            if reason is not None:
                entries[name] = _Refusal(self, name, hidden)
            elif hidden is not None:
                entries[name] = hidden

    @property
    def replica(self) -> str:
        """Under external_launcher with tensor parallelism the same on the ranks that hold parts of one model."""
        llm = self._llm()
        parallel, local = llm.llm_engine.vllm_config.parallel_config, _local_worker(llm)
        if local is None or parallel.distributed_executor_backend != "external_launcher" or parallel.world_size == 1:
            return super().replica
        return f"{llm.model_config.model}, ranks from {local.rank // parallel.world_size * parallel.world_size}"

    def endpoints(self) -> Sequence[Endpoint]:
        """Every worker, in the order of worker ranks. From then on the death of one of them is noticed at once."""
        endpoints = super().endpoints()
        manager = _process_manager(self._llm())
        parents = {os.getpid(), *(process.pid for process in manager.processes)} if manager is not None else set()
        for pid in {endpoint.pid for endpoint in endpoints} - self._pidfds.keys():
            with suppress(OSError):  # then it is the engine core that notices, later
                if _parent(pid) in parents:
                    self._pidfds[pid] = os.pidfd_open(pid)
        return endpoints

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
            self._run("freeze its requests", lambda: engine.sleep(level=0, mode="keep"), deadline)
            self._held = True

    def on_resume(self, deadline: Deadline) -> None:
        """Go on with requests that were frozen."""
        if self._held:
            engine = self._llm().llm_engine
            self._run("go on", lambda: engine.wake_up(["scheduling"]), deadline)
            self._held = False

    def on_reset_cache(self, deadline: Deadline) -> None:
        """Drop prefix and encoder caches. Requests that were frozen compute theirs again."""
        self._run("drop its caches", lambda: self._reset_caches(self._llm()), deadline)

    def on_sleep(self, level: int, deadline: Deadline) -> None:
        """`LLM.sleep`. Raises `EngineStateError` if requests are unfinished, `ConfigError` without sleep mode."""
        llm = self._llm()
        config = llm.llm_engine.vllm_config
        if config.device_config.device_type != "cpu" and not config.model_config.enable_sleep_mode:
            raise ConfigError(f"{self.name} was made without sleep mode; pass enable_sleep_mode=True to vllm.LLM")
        unfinished = llm.llm_engine.get_num_unfinished_requests()
        if unfinished:
            raise EngineStateError(f"{self.name} has {unfinished} unfinished request(s) and cannot sleep now")
        self._run("sleep", lambda: llm.sleep(level=level), deadline)

    def on_wake_up(self, tags: Sequence[str], deadline: Deadline) -> None:
        """`LLM.wake_up`, with every tag named: without, vLLM 0.26 maps again what is awake."""
        llm = self._llm()
        self._run("wake up", lambda: llm.wake_up(list(tags)), deadline)

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

    def _llm(self) -> Any:
        llm = self._llm_ref()
        if llm is None:
            raise EngineStateError(f"{self.name}: the vllm.LLM was deleted")
        return llm

    def _reason_not_to_serve(self) -> str | None:
        reason = super()._reason_not_to_serve()
        return reason if reason is not None or self._call is None or self._call.done else _unanswered(self, self._call)

    def _run(self, doing: str, work: Callable[[], T], deadline: Deadline | None) -> T:
        """`work()` on a thread of its own, until it ends, an engine process dies, or the deadline is over.

        vLLM waits without limit for an engine core that died with a call unanswered. After a deadline the LLM is
        guarded until the call has ended: its sockets are for one thread at a time.
        """
        if self._dead is not None:
            raise PeerError(f"{self._dead}; start a new vllm.LLM")
        name = f"{self.name} to {doing}"
        left_s = None if deadline is None else deadline.remaining(name)
        with self._calling:
            if self._call is not None and not self._call.done:
                raise EngineStateError(_unanswered(self, self._call))
            call: Background[T] = Background(name, work)
            self._call = call
        ended, at_end = socketpair()
        call.add_done_callback(at_end.close)
        with ended:
            ready = wait([ended, *self._lifelines()], left_s)
        if not ready and deadline is not None:
            self.guard(self._reason_not_to_serve())
            raise SyncTimeout(f"gave up after {deadline.timeout_s:g} s: still waiting for {name}")
        if not call.done:
            self._dead = f"{self.name} died: {self._obituary(ready)}, while waiting for {call.name}"
            raise PeerError(self._dead)
        try:
            return call.result(Deadline.after(1.0))
        except WsyncError:
            raise
        except Exception as error:
            raise PeerError(f"{self.name} failed to {doing}: {type(error).__name__}: {error}") from error

    def _lifelines(self) -> list[int]:
        """What becomes readable when the engine-core process or a worker process ends."""
        manager = _process_manager(self._llm())
        return [*(manager.sentinels() if manager is not None else ()), *self._pidfds.values()]

    def _obituary(self, ready: Sequence[object]) -> str:
        workers = [str(pid) for pid, fd in self._pidfds.items() if fd in ready]
        return f"its worker process {', '.join(workers)} ended" if workers else "its engine-core process ended"


class _Refusal:
    """Stands in for a method of the engine and remembers what it hides. Goes away once there is no reason any more."""

    def __init__(self, engine: VLLMEngine, name: str, hides: Any) -> None:
        self._engine, self._name = engine, name
        self.hides = hides

    def __call__(self, *args: object, **kwargs: object) -> Any:
        reason = self._engine._reason_not_to_serve()
        if reason is not None:
            raise EngineStateError(reason)
        self._engine.guard(None)  # an answer that was late has come
        return getattr(self._engine._llm().llm_engine, self._name)(*args, **kwargs)


def _unanswered(engine: VLLMEngine, call: Background[Any]) -> str:
    return f"{engine.name} has not answered yet: still waiting for {call.name}"


def _is_vllm(obj: object, name: str) -> bool:
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == "vllm" for kind in type(obj).__mro__)


def _check_version(allow_untested: bool) -> str:
    version: str = sys.modules["vllm"].__version__
    if version.partition("+")[0] not in SUPPORTED_VERSIONS and not allow_untested:
        raise UnsupportedError(
            f"vLLM {version} is not among the supported versions ({', '.join(SUPPORTED_VERSIONS)}). To go on at "
            f"your own risk, pass wsync.adapters.engines.vllm.VLLMEngine(llm, allow_untested=True) in place of llm"
        )
    return version


def _local_worker(llm: Any) -> Any | None:
    """vLLM's worker object if it lives in this process."""
    executor = getattr(llm.llm_engine, "model_executor", None)
    wrapper = getattr(executor, "driver_worker", None)
    return getattr(wrapper, "worker", None)


def _process_manager(llm: Any) -> Any | None:
    """What watches the engine-core process; None if the engine core runs in this process."""
    manager = getattr(getattr(llm.llm_engine.engine_core, "resources", None), "engine_manager", None)
    return manager if hasattr(manager, "processes") else None  # under Ray there are actors instead


def _parent(pid: int) -> int:
    """Process id of the parent of `pid` as this process sees it. Raises `OSError` if there is no `pid`."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def _close_all(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def _check_extension(llm: Any) -> None:
    given = llm.llm_engine.vllm_config.parallel_config.worker_extension_cls
    module, _, attribute = given.rpartition(".")
    if not given or not hasattr(getattr(import_module(module), attribute), "wsync_call"):
        seen = f"has worker_extension_cls={given!r}" if given else "was made without it"
        raise ConfigError(
            f'this vllm.LLM runs its workers in other processes: pass worker_extension_cls="{EXTENSION}" to vllm.LLM '
            f"(it {seen}), or a subclass of that class; or set VLLM_ENABLE_V1_MULTIPROCESSING=0 to run it here"
        )
