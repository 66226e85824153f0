"""What the control halves for a `vllm.LLM` (vllm.py) and an `AsyncLLM` (vllm_async.py) have in common."""

import os
import sys
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from socket import socketpair
from typing import Any, ClassVar, Protocol, TypeVar

from wsync.adapters.engines.vllm_worker import EXTENSION
from wsync.deadline import Deadline
from wsync.engine import WorkerEngine
from wsync.errors import ConfigError, EngineStateError, PeerError, SyncTimeout, UnsupportedError, WsyncError
from wsync.topology import Endpoint

SUPPORTED_VERSIONS = ("0.26.0", "0.32.0")
"""The tests run 0.32.0. Of 0.26.0 what is used here was compared with it in the source, and has not been run."""

E = TypeVar("E", bound="VLLMControl")

# An engine lives as long as its LLM: what one session left behind, torn say, must be known to the next one.
_engines: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()


class Call(Protocol):
    """A call of vLLM that goes on by itself; see `wsync.background.Background`."""

    name: str

    @property
    def done(self) -> bool: ...

    def add_done_callback(self, callback: Callable[[], None]) -> None: ...

    def result(self, deadline: Deadline) -> Any: ...


class VLLMControl(WorkerEngine):
    """Control of one LLM, which is held weakly. All that adds or runs requests is guarded."""

    made_by: ClassVar[str]
    """What people call the class of the LLM."""

    guarded: ClassVar[tuple[str, ...]]
    """Methods of the front half that refuse while the engine may not serve."""

    @staticmethod
    @abstractmethod
    def matches(obj: object) -> bool:
        """True for the class of vLLM that it controls. Imports nothing."""

    def __new__(cls: type[E], llm: Any, *, allow_untested: bool = False) -> E:
        """The engine of `llm`, made by the first call; see `__init__`."""
        if not cls.matches(llm):
            raise UnsupportedError(
                f"{type(llm).__module__}.{type(llm).__qualname__} is not supported; use {cls.made_by}"
            )
        engine: E | None = _engines.get(llm)
        if engine is None:
            engine = super().__new__(cls)
            engine._connect(llm, allow_untested)
            _engines[llm] = engine
        return engine

    def __init__(self, llm: Any, *, allow_untested: bool = False) -> None:
        """Args:
            llm: the LLM. The same one gives the same engine.
            allow_untested: take a version of vLLM that is not in `SUPPORTED_VERSIONS`.

        Raises:
            UnsupportedError: the class, the version, or what it was made with is not supported.
            ConfigError: it runs its workers in other processes and was made without the worker extension.
        """
        # All is done in __new__: this runs at every call, also for an LLM that is in use.

    def _connect(self, llm: Any, allow_untested: bool) -> None:
        super().__init__()
        self.name = f"vLLM {_check_version(type(self), allow_untested)}"
        self._llm_ref = weakref.ref(llm)
        self._guarding = threading.Lock()
        self._held = False
        self._dead: str | None = None
        self._pidfds: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._pidfds)

    # What an LLM and an AsyncLLM do each in their own way.

    @staticmethod
    @abstractmethod
    def _front(llm: Any) -> Any:
        """The object of this process that has the configuration, the requests and the client of the engine core."""

    @abstractmethod
    def _start(self, name: str, work: Callable[[], Any]) -> Call:
        """Begin `work()`, a call of vLLM. Raises `WsyncError` if it cannot be called now."""

    @abstractmethod
    def _let_go(self, call: Call) -> None:
        """Nobody waits any more for `call`, which has not ended."""

    @abstractmethod
    def _reset_caches(self, llm: Any) -> Any:
        """Work for `_run`: forget every cached prefix and encoder output. Raises `EngineStateError` if any was kept."""

    @abstractmethod
    def _release_cache(self, llm: Any) -> Any:
        """Work for `_run`: stop the scheduler, as vLLM wants it, and release the cache; after an error neither."""

    # What WorkerEngine asks for.

    def call(self, method: str, payload: bytes, timeout_s: float | None) -> Sequence[bytes]:
        """Run `Worker.handle(method, payload)` on every worker; replies in rank order. Raises as its base."""
        llm, deadline = self._llm(), None if timeout_s is None else Deadline.after(timeout_s)
        replies: Sequence[bytes] = self._run(
            f"answer {method!r}", lambda: llm.collective_rpc("wsync_call", args=(method, payload)), deadline
        )
        return replies

    def guard(self, reason: str | None) -> None:
        """Refuse to add or run requests with `EngineStateError(reason)`; None: leave no trace of that."""
        with self._guarding:
            self._put_guard(reason)

    def lift_guard(self) -> None:
        """Take away a guard for which there is no reason any more: an answer that was late has come."""
        with self._guarding:  # a sync may begin on another thread at this moment: it must not lose its guard
            self._put_guard(self._reason_not_to_serve())

    def _put_guard(self, reason: str | None) -> None:
        llm = self._llm_ref()
        if llm is None:
            return
        entries = vars(self._front(llm))
        for name in self.guarded:
            found = entries.get(name)
            hidden = found.hides if isinstance(found, _Refusal) else found
            if reason is not None:
                entries[name] = _Refusal(self, name, hidden)
            elif hidden is not None:
                entries[name] = hidden
            else:
                entries.pop(name, None)

    def endpoints(self) -> Sequence[Endpoint]:
        """Every worker, in the order of worker ranks. From then on the death of one of them is noticed at once."""
        endpoints = super().endpoints()
        manager = _process_manager(self._front(self._llm()))
        parents = {os.getpid(), *(process.pid for process in manager.processes)} if manager is not None else set()
        for pid in {endpoint.pid for endpoint in endpoints} - self._pidfds.keys():
            with suppress(OSError):  # then it is the engine core that notices, later
                if _parent(pid) in parents:
                    self._pidfds[pid] = os.pidfd_open(pid)
        return endpoints

    def on_reset_cache(self, deadline: Deadline) -> None:
        """Drop prefix and encoder caches. Requests that were frozen compute theirs again."""
        self._run("drop its caches", lambda: self._reset_caches(self._llm()), deadline)

    def on_sleep(self, level: int, deadline: Deadline) -> None:
        """vLLM's `sleep`. Raises `EngineStateError` if requests are unfinished, `ConfigError` without sleep mode."""
        llm = self._llm()
        self._check_sleep_mode()
        self._require_idle()
        self._run("sleep", lambda: llm.sleep(level=level), deadline)

    def check_release_cache(self) -> None:
        """Raises `UnsupportedError` on a CPU and before vLLM 0.32.0, `ConfigError` without sleep mode."""
        llm = self._llm()
        on_cpu = self._front(llm).vllm_config.device_config.device_type == "cpu"
        if on_cpu or not hasattr(llm, "release_kv_cache_memory"):
            raise UnsupportedError(
                f"{self.name}{' on a CPU' if on_cpu else ''} cannot release its KV cache and keep its weights; "
                f"vLLM 0.32.0 can, on a GPU"
            )
        self._check_sleep_mode()

    def on_release_cache(self, deadline: Deadline) -> None:
        """vLLM's `release_kv_cache_memory`. Raises `EngineStateError` if requests are unfinished."""
        self.check_release_cache()
        self._require_idle()
        self._run("release its KV cache", lambda: self._release_cache(self._llm()), deadline)

    def on_wake_up(self, tags: Sequence[str], deadline: Deadline) -> None:
        """vLLM's `wake_up`, with every tag named: without, vLLM 0.26 maps again what is awake."""
        llm = self._llm()
        self._run("wake up", lambda: llm.wake_up(list(tags)), deadline)

    # Shared by the above.

    def _check_sleep_mode(self) -> None:
        config = self._front(self._llm()).vllm_config
        if config.device_config.device_type != "cpu" and not config.model_config.enable_sleep_mode:
            raise ConfigError(f"{self.name} was made without sleep mode; pass enable_sleep_mode=True to make it")

    def _require_idle(self) -> None:
        if unfinished := len(self._front(self._llm()).output_processor.request_states):
            raise EngineStateError(f"{self.name} has {unfinished} unfinished request(s) and cannot sleep now")

    def _llm(self) -> Any:
        llm = self._llm_ref()
        if llm is None:
            raise EngineStateError(f"{self.name}: the {self.made_by} was deleted")
        return llm

    def _run(self, doing: str, work: Callable[[], Any], deadline: Deadline | None) -> Any:
        """What `work()` comes to, until it ends, an engine process dies, or the deadline is over.

        vLLM waits without limit for an engine core that died with a call unanswered.
        """
        if self._dead is not None:
            raise PeerError(f"{self._dead}; start a new {self.made_by}")
        name = f"{self.name} to {doing}"
        left_s = None if deadline is None else deadline.remaining(name)
        call = self._start(name, work)
        ready = self._wait(call, left_s)
        if not ready and deadline is not None:
            self._let_go(call)
            raise SyncTimeout(f"gave up after {deadline.timeout_s:g} s: still waiting for {name}")
        if not call.done:
            self._dead = f"{self.name} died: {self._obituary(ready)}, while waiting for {name}"
            self._let_go(call)
            raise PeerError(self._dead)
        try:
            return call.result(Deadline.after(1.0))
        except WsyncError:
            raise
        except Exception as error:
            words = f"{self.name} failed to {doing}: {type(error).__name__}: {error}"
            if any(kind.__name__ == "EngineDeadError" for kind in type(error).__mro__):  # vLLM's, seen before its end
                self._dead, words = words, f"{words}; start a new {self.made_by}"
            raise PeerError(words) from error

    def _wait(self, call: Call, left_s: float | None) -> Sequence[object]:
        """What ended first, the call or processes of vLLM; nothing if nothing did within `left_s` seconds."""
        lifelines = self._lifelines()
        if not lifelines:
            done = threading.Event()
            call.add_done_callback(done.set)
            return [call] if done.wait(left_s) else []
        ended, at_end = socketpair()
        call.add_done_callback(at_end.close)
        with ended:
            return wait([ended, *lifelines], left_s)

    def _lifelines(self) -> list[int]:
        """What becomes readable when the engine-core process or a worker process ends."""
        manager = _process_manager(self._front(self._llm()))
        return [*(manager.sentinels() if manager is not None else ()), *self._pidfds.values()]

    def _obituary(self, ready: Sequence[object]) -> str:
        workers = [str(pid) for pid, fd in self._pidfds.items() if fd in ready]
        return f"its worker process {', '.join(workers)} ended" if workers else "its engine-core process ended"


class _Refusal:
    """Stands in for a method of the engine and remembers what it hides. Goes away once there is no reason any more."""

    def __init__(self, engine: VLLMControl, name: str, hides: Any) -> None:
        self._engine, self._name = engine, name
        self.hides = hides

    def __call__(self, *args: object, **kwargs: object) -> Any:
        reason = self._engine._reason_not_to_serve()
        if reason is not None:
            raise EngineStateError(reason)
        self._engine.lift_guard()
        return getattr(self._engine._front(self._engine._llm()), self._name)(*args, **kwargs)


def check_extension(config: Any, made_by: str, other_way: str = "") -> None:
    """Raises `ConfigError` if workers were made without the worker extension. `config` is vLLM's own."""
    given = config.parallel_config.worker_extension_cls
    module, _, attribute = given.rpartition(".")
    if not given or not hasattr(getattr(import_module(module), attribute), "wsync_call"):
        seen = f"has worker_extension_cls={given!r}" if given else "was made without it"
        raise ConfigError(
            f'this {made_by} runs its workers in other processes: pass worker_extension_cls="{EXTENSION}" to make it '
            f"(it {seen}), or a subclass of that class{other_way}"
        )


def is_vllm(obj: object, name: str) -> bool:
    """Whether `obj` is of vLLM's class `name`, or a subclass of it. Imports nothing."""
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == "vllm" for kind in type(obj).__mro__)


def _check_version(kind: type, allow_untested: bool) -> str:
    version: str = sys.modules["vllm"].__version__
    if version.partition("+")[0] not in SUPPORTED_VERSIONS and not allow_untested:
        raise UnsupportedError(
            f"vLLM {version} is not among the supported versions ({', '.join(SUPPORTED_VERSIONS)}). To go on at "
            f"your own risk, pass {kind.__module__}.{kind.__qualname__}(llm, allow_untested=True) in place of llm"
        )
    return version


def _process_manager(front: Any) -> Any | None:
    """What watches the engine-core process; None if the engine core runs in this process."""
    manager = getattr(getattr(front.engine_core, "resources", None), "engine_manager", None)
    return manager if hasattr(manager, "processes") else None  # under Ray there are actors instead


def _parent(pid: int) -> int:
    """Process id of the parent of `pid` as this process sees it. Raises `OSError` if there is no `pid`."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def _close_all(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
