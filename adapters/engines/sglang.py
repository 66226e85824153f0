"""SGLang as the engine, driven through an `sglang.Engine` object.

SGLang runs its model in scheduler processes. There are three ways into them, tried in this order:

    plugin       SGLang found wsync's entry point when it started: the usual case, nothing has to be passed
    loader       the engine was started with custom_weight_loader=["wsync.adapters.engines.sglang_worker.load"]
    own calls    neither: SGLang's own update calls, which take every tensor through its loader

The first two have wsync's worker half in every scheduler process, with load plans, shared memory and `read`.
"""

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from wsync.adapters.engines.launch_files import safetensors_files
from wsync.adapters.engines.sglang_calls import Calls, Updates
from wsync.adapters.engines.sglang_desk import Desk
from wsync.adapters.engines.sglang_own import OwnCallsLoader, OwnCallsWorker
from wsync.adapters.engines.sglang_worker import CUSTOM_LOADER, METHOD
from wsync.background import Background
from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.engine import WorkerEngine
from wsync.errors import ConfigError, EngineStateError, PeerError, UnsupportedError, WsyncError
from wsync.plan import TensorSpec
from wsync.protocols import Manifest

SUPPORTED_VERSIONS = ("0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
"""The tests run 0.5.23. Of 0.5.17 what is used here was compared with it in the source."""

_POLL_MS = 50
"""Between two looks whether the engine died while a call waits."""

_HOW_TO_GET_A_WORKER = (
    f'install wsync in the environment of the engine (pip install "wsync-rl[sglang]") and start it again, so that '
    f"SGLang finds wsync's plugin (SGLANG_PLUGINS, if set, must name wsync); or pass "
    f'custom_weight_loader=["{CUSTOM_LOADER}"] to sglang.Engine'
)

# An engine lives as long as its sglang.Engine: what one session left behind, torn say, must be known to the next one.
_engines: "weakref.WeakKeyDictionary[Any, SGLangEngine]" = weakref.WeakKeyDictionary()


class SGLangEngine(WorkerEngine):
    """Control of one `sglang.Engine`, which is held weakly. Every request to it is guarded.

    An engine is for one thread at a time: do not use it on another one while a sync runs, except for requests of
    `async_generate`, on an event loop that runs on.
    """

    @staticmethod
    def matches(obj: object) -> bool:
        """True for the engine class of SGLang. Imports nothing."""
        return any(kind.__name__ == "Engine" and _root(kind) == "sglang" for kind in type(obj).__mro__)

    def __new__(cls, engine: Any, *, allow_untested: bool = False) -> "SGLangEngine":
        """The control half of `engine`, made by the first call; see `__init__`."""
        if not cls.matches(engine):
            raise UnsupportedError(f"{type(engine).__module__}.{type(engine).__qualname__} is no sglang.Engine")
        known = _engines.get(engine)
        if known is None:
            known = super().__new__(cls)
            known._connect(engine, allow_untested)
            _engines[engine] = known
        return known

    def __init__(self, engine: Any, *, allow_untested: bool = False) -> None:
        """Args:
            engine: an `sglang.Engine`. The same one gives the same control half.
            allow_untested: take a version of SGLang that is not in `SUPPORTED_VERSIONS`.

        Raises:
            UnsupportedError: the version, or something that the engine was started with, is not supported.
            ConfigError: there is no way into this engine; the message says how to start it.
        """
        # All is done in __new__: this runs on every SGLangEngine(engine), also on one that is in use.

    def _connect(self, engine: Any, allow_untested: bool) -> None:
        super().__init__()
        version = _check_version(allow_untested)
        _check_arguments(engine)
        arguments = engine.server_args
        self.way = _way(engine)
        """How the workers are reached: "plugin", "loader" or "own calls"."""

        self.name = f"SGLang {version}" if self.way == "plugin" else f"SGLang {version} ({self.way})"
        self._size = int(arguments.tp_size)
        self._folder = _launch_folder(arguments)
        self._calls = Calls(engine, self.name)
        self._updates = Updates(self._calls, self._size)
        self._ring: Background[None] | None = None
        self._calling = threading.Lock()
        self._thread = threading.current_thread()
        self._dead: str | None = None
        self._worker: OwnCallsWorker | None = None
        if self.way == "own calls":
            if self._folder is None or not safetensors_files(self._folder):
                raise ConfigError(
                    f"{self.name} was started without wsync's worker half, and not from a folder with safetensors "
                    f"files that would say which tensors it takes: {_HOW_TO_GET_A_WORKER}"
                )
            self._worker = OwnCallsWorker(
                OwnCallsLoader(self.name, self._folder, self._updates, lambda: self._patience_s)
            )

    # What WorkerEngine asks for.

    def call(self, method: str, payload: bytes, timeout_s: float | None) -> Sequence[bytes]:
        """Run `Worker.handle(method, payload)` on every worker; replies in rank order. Raises as its base."""
        if self._worker is not None:
            return [self._worker.handle(method, payload)]
        if self._dead is not None:
            raise PeerError(f"{self._dead}; start a new sglang.Engine")
        folder = "" if self._folder is None else str(self._folder)
        with Desk((method, payload, folder), self._size, self._calls.lifelines) as desk:
            ring = self._ring_at(desk.address, f"{self.name} to answer {method!r}")
            try:
                return desk.serve(ring, timeout_s)
            except PeerError as error:
                if not ring.done:
                    self._dead = f"{self.name} died: {error}, while waiting for {ring.name}"
                    with suppress(WsyncError):
                        ring.result(Deadline.after(1.0))
                    raise PeerError(self._dead) from error
                raise

    def guard(self, reason: str | None) -> None:
        """Refuse requests with `EngineStateError(reason)`; None: leave no trace of that."""
        # generate, encode, rerank, score and their asynchronous twins all go through this method.
        engine = self._calls.alive()
        if engine is None:
            return
        entries = vars(engine.tokenizer_manager)
        found = entries.pop("generate_request", None)
        hidden = found.hides if isinstance(found, _Refusal) else found
        if reason is not None:
            entries["generate_request"] = _Refusal(reason, hidden)
        elif hidden is not None:
            entries["generate_request"] = hidden

    def on_pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """abort: end all requests. wait: let them finish. keep: put them back in the queue, to be computed anew.

        SGLang's own mode "in_place" is not used: it would go on from caches of the old weights.
        """
        self._thread = threading.current_thread()
        self._calls.settle(mode, deadline)

    def on_resume(self, deadline: Deadline) -> None:
        """Run batches again."""
        self._calls.go_on(deadline)

    def on_reset_cache(self, deadline: Deadline) -> None:
        """Drop the radix cache."""
        self._calls.flush(deadline)

    def on_sleep(self, level: int, deadline: Deadline) -> None:
        """`release_memory_occupation`. Raises `EngineStateError` if requests are unfinished, `ConfigError` without."""
        self.check_release_cache()
        arguments = self._calls.engine.server_args
        if arguments.device != "cpu" and level == 1 and not arguments.enable_weights_cpu_backup:
            raise ConfigError(
                f"{self.name} keeps no weights while it sleeps; pass enable_weights_cpu_backup=True to sglang.Engine, "
                f"or sleep at level 2"
            )
        self._release(("weights", "kv_cache"), deadline)

    def check_release_cache(self) -> None:
        """Raises `ConfigError` without the memory saver."""
        arguments = self._calls.engine.server_args
        if arguments.device != "cpu" and not arguments.enable_memory_saver:
            raise ConfigError(f"{self.name} cannot release memory; pass enable_memory_saver=True to sglang.Engine")

    def on_release_cache(self, deadline: Deadline) -> None:
        """`release_memory_occupation` of that tag alone. Raises `EngineStateError` if requests are unfinished."""
        self._release(("kv_cache",), deadline)

    def on_wake_up(self, tags: Sequence[str], deadline: Deadline) -> None:
        """`resume_memory_occupation`."""
        self._calls.restore(tags, deadline)

    def describe(self, specs: Sequence[TensorSpec], deadline: Deadline) -> Sequence[Manifest]:
        """Dry-run the loader of every worker on `specs`. Nothing is written."""
        self._thread = threading.current_thread()
        return super().describe(specs, deadline)

    def close(self, address: str | None = None) -> None:
        """Let the workers drop the receivers attached at `address` (None: any). The engine stays. Never raises.

        Workers are told only on the thread of the last sync: on another one they may be in use at the same time. They
        then drop them at the next sync.
        """
        if threading.current_thread() is self._thread:
            super().close(address)

    # Shared by the above.

    def _release(self, tags: Sequence[str], deadline: Deadline) -> None:
        if unfinished := self._calls.in_flight():
            raise EngineStateError(f"{self.name} has {len(unfinished)} unfinished request(s) and cannot sleep now")
        self._calls.flush(deadline)  # it also shows that the scheduler is through: asleep too early, it ends itself
        self._calls.release(tags, deadline)

    def _ring_at(self, address: str, name: str) -> Background[None]:
        """Call every worker to `address`. Raises `EngineStateError` while an earlier call is unanswered."""
        bell = self._bell(address)
        with self._calling:
            if self._ring is not None and not self._ring.done:
                raise EngineStateError(f"{self.name} has not answered yet: still waiting for {self._ring.name}")
            self._ring = Background(name, bell)
            return self._ring

    def _bell(self, address: str) -> Callable[[], None]:
        """What makes every worker come to `address`, and returns when they have answered."""
        if self.way == "plugin":
            return lambda: self._call_plugin(address)

        def load() -> None:
            self._updates.begin(self._patience_s)
            try:
                self._updates.send([(address, torch.zeros(1))], CUSTOM_LOADER, None)
            finally:
                self._updates.end(self._patience_s)

        return load

    def _call_plugin(self, address: str) -> None:
        """`Engine.collective_rpc`, except that it ends when a process of the engine does.

        SGLang would wait on, and `Engine.shutdown` crashes over a socket on which another thread waits.
        """
        import sglang.srt.managers.io_struct as module

        pipe = self._calls.engine.send_to_rpc
        module.sock_send(pipe, module.RpcReqInput(method=METHOD, parameters={"address": address}))
        while not pipe.poll(_POLL_MS):
            if self._dead is not None:
                raise PeerError(self._dead)
        reply = module.sock_recv(pipe)
        if not reply.success:
            cure = f"; {_HOW_TO_GET_A_WORKER}" if f"no attribute '{METHOD}'" in reply.message else ""
            raise PeerError(f"{self.name} could not call its workers: {reply.message}{cure}")


class _Refusal:
    """Stands in for a method of the engine and remembers what it hides."""

    def __init__(self, reason: str, hides: Any) -> None:
        self._reason = reason
        self.hides = hides

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise EngineStateError(self._reason)


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _check_version(allow_untested: bool) -> str:
    version: str = sys.modules["sglang"].__version__
    release = version.partition("+")[0].partition(".post")[0]
    if release not in SUPPORTED_VERSIONS and not allow_untested:
        raise UnsupportedError(
            f"SGLang {version} is not among the supported versions ({', '.join(SUPPORTED_VERSIONS)}). To go on at your "
            f"own risk, pass wsync.adapters.engines.sglang.SGLangEngine(engine, allow_untested=True) in place of engine"
        )
    return version


def _check_arguments(engine: Any) -> None:
    """Raises `UnsupportedError` for what the engine was started with and nothing here can serve."""
    arguments = engine.server_args
    wanted = {
        "pp_size": (1, None),
        "dp_size": (1, None),
        "nnodes": (1, None),
        "tokenizer_worker_num": (1, None),
        "speculative_algorithm": (None,),
        "disaggregation_mode": ("null", None),
        "weight_cache_mode": ("off", None),
    }
    for name, fine in wanted.items():
        if (given := getattr(arguments, name, None)) not in fine:
            raise UnsupportedError(f"an sglang.Engine with {name}={given!r} is not supported; leave it at {fine[0]!r}")
    quantization = getattr(engine.tokenizer_manager.model_config, "quantization", None)
    if quantization is not None:
        raise UnsupportedError(f"an sglang.Engine with quantization={quantization!r} is not supported")


def _way(engine: Any) -> str:
    """SGLang loads plugins in this process as it does in its schedulers."""
    module = sys.modules.get("sglang.srt.managers.scheduler")
    if hasattr(getattr(module, "Scheduler", None), METHOD):
        return "plugin"
    return "loader" if CUSTOM_LOADER in (engine.server_args.custom_weight_loader or ()) else "own calls"


def _launch_folder(arguments: Any) -> Path | None:
    """The checkpoint that the engine was started with, if it is a folder."""
    folder = Path(arguments.model_path)
    return folder if arguments.load_format != "dummy" and folder.is_dir() else None
