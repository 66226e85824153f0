"""The embedded engine: a Hugging Face model that generates, in this process or in a worker process of its own."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from wsync.adapters.engines.hf_model import LocalModel
from wsync.adapters.engines.hf_process import WorkerProcess
from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.engine import WorkerEngine
from wsync.errors import ConfigError, EngineStateError, UnsupportedError


class _Link(Protocol):
    """Where the model lives: `LocalModel` in this process, `WorkerProcess` in another."""

    def handle(self, method: str, payload: bytes, timeout_s: float | None) -> bytes: ...

    def generate(
        self, rows: Sequence[Sequence[int]], max_new_tokens: int, options: Mapping[str, Any], ended: Callable[[], None]
    ) -> list[list[int]]: ...

    def stop(self, stopping: bool) -> None: ...

    def guard(self, reason: str | None) -> None: ...

    def sleep(self, level: int, timeout_s: float) -> None: ...

    def wake_up(self, timeout_s: float) -> None: ...

    def shutdown(self) -> None: ...


# An engine lives as long as its model: what one session left behind, torn say, must be known to the next one.
_engines: "weakref.WeakKeyDictionary[nn.Module, HFEngine]" = weakref.WeakKeyDictionary()


class HFEngine(WorkerEngine):
    """A transformers model as an engine.

    `HFEngine(model)` takes a model of this process and holds it weakly; `HFEngine(model)` again is the same engine.
    While the engine may not serve, `model(...)` and `model.generate` raise `EngineStateError` too; a pause waits only
    for generations that were started here.
    `HFEngine.launch(folder)` starts a worker process that has the model to itself.
    """

    name = "hf"
    _link: _Link

    def __new__(cls, model: nn.Module) -> "HFEngine":
        """The engine of `model`, made by the first call."""
        engine = _engines.get(model)
        if engine is None:
            engine = super().__new__(cls)
            engine._connect(LocalModel(model))
            _engines[model] = engine
        return engine

    def __init__(self, model: nn.Module) -> None:
        """Take `model` (anything with `generate`). Raises `UnsupportedError` if its weights cannot be named."""
        # All is done in __new__: this runs on every HFEngine(model), also on one that is in use.

    def _connect(self, link: _Link) -> None:
        super().__init__()
        self._link = link
        self._idle = threading.Condition()
        self._running = 0
        self._reason: str | None = None

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `HFEngine(obj)` works."""
        return isinstance(obj, nn.Module) and callable(getattr(obj, "generate", None))

    @classmethod
    def launch(
        cls,
        model_path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: str = "cpu",
        timeout_s: float = 120.0,
    ) -> "HFEngine":
        """Start a worker process that loads the checkpoint folder `model_path`. It ends with this process.

        Args:
            model_path: folder with config.json and safetensors.
            dtype: of the parameters; None: as in the checkpoint.
            device: where the worker puts the model.
            timeout_s: longest wait, in seconds, for the worker to start and for each of its answers, generations
                included.

        Raises:
            ConfigError: there is no such folder.
            PeerError: the worker died or could not load the checkpoint.
            SyncTimeout: it was not ready in time; it has been ended.
        """
        folder = Path(model_path)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is not a checkpoint folder: it has no config.json")
        engine = super().__new__(cls)
        engine._connect(WorkerProcess(folder.absolute(), dtype=dtype, device=device, timeout_s=timeout_s))
        return engine

    @property
    def pid(self) -> int | None:
        """Process id of the launched worker; None if the model is in this process."""
        return getattr(self._link, "pid", None)

    def generate(
        self, input_ids: torch.Tensor | Sequence[Sequence[int]], *, max_new_tokens: int, **options: Any
    ) -> list[list[int]]:
        """New tokens of each prompt, without the prompt, up to and with the end-of-sequence token. Greedy by default.

        May be called from several threads. A `pause` with "abort" makes it return early with what it has.

        Args:
            input_ids: token ids, int `[batch, length]`, or rows of any length.
            max_new_tokens: at most that many tokens a row.
            options: for transformers' `generate`; plain data if the model is in a worker process.

        Raises:
            EngineStateError: the engine is paused, updating, torn, asleep or without weights.
            PeerError: the worker process died or failed.
        """
        rows = input_ids.tolist() if isinstance(input_ids, torch.Tensor) else [list(row) for row in input_ids]
        if not all(isinstance(row, list) and row for row in rows):
            raise ConfigError("generate takes a batch of prompts, each of at least one token")
        if not rows:
            return []
        with self._idle:
            if self._reason is not None:
                raise EngineStateError(f"{self.name} cannot generate: {self._reason}")
            self._running += 1
        return self._link.generate(rows, max_new_tokens, options, self._ended)

    def shutdown(self) -> None:
        """End a launched worker process. A model of this process stays as it is. May be called twice."""
        self._link.shutdown()

    def __enter__(self) -> "HFEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # See WorkerEngine.

    def begin(self, version: int, attempt: str, deadline: Deadline, *, digest: bool) -> None:
        """As `WorkerEngine.begin`. Raises `EngineStateError` while a generation runs: pause first."""
        with self._idle:
            self._require_idle(f"take version {version}")
            super().begin(version, attempt, deadline, digest=digest)

    def sleep(self, level: int = 2, tags: Sequence[str] | None = None) -> None:
        """As `WorkerEngine.sleep`. Raises `EngineStateError` while a generation runs: pause first."""
        with self._idle:
            self._require_idle("sleep")
            super().sleep(level, tags)

    def call(self, method: str, payload: bytes, timeout_s: float | None) -> Sequence[bytes]:
        """Ask the only worker."""
        return [self._link.handle(method, payload, timeout_s)]

    def guard(self, reason: str | None) -> None:
        """Refuse generations, and every other forward of a model in this process once none runs any more."""
        with self._idle:
            self._reason = reason
            if reason is None or not self._running:
                self._link.guard(reason)

    def on_pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Wait for running generations, or end them."""
        if mode == "keep":
            raise UnsupportedError(
                "hf cannot freeze a running generation: its key-value cache was made by the old weights, and "
                'transformers cannot make it anew; pause with "wait" or "abort"'
            )
        try:
            if mode == "abort":
                self._link.stop(True)
            with self._idle:
                while self._running:
                    self._idle.wait(deadline.remaining(f"{self._running} generation(s) of {self.name} to end"))
        except BaseException:
            self._link.stop(False)
            raise

    def on_resume(self, deadline: Deadline) -> None:
        """Let generations run to their ends again."""
        self._link.stop(False)

    def on_reset_cache(self, deadline: Deadline) -> None:
        """Nothing to forget: each generation makes its own cache and drops it."""

    def on_sleep(self, level: int, deadline: Deadline) -> None:
        """Free parameters and buffers."""
        self._link.sleep(level, deadline.remaining(f"{self.name} to sleep"))

    def check_release_cache(self) -> None:
        """It can: each generation makes its own cache and drops it, so that none is left when none runs."""

    def on_release_cache(self, deadline: Deadline) -> None:
        """Nothing is left to release."""

    def on_wake_up(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Allocate parameters and buffers; there is no cache to bring back."""
        if "weights" in tags:
            self._link.wake_up(deadline.remaining(f"{self.name} to wake up"))

    def _ended(self) -> None:
        with self._idle:
            self._running -= 1
            if not self._running:
                self._link.guard(self._reason)
            self._idle.notify_all()

    def _require_idle(self, doing: str) -> None:
        if self._running:
            raise EngineStateError(f"{self.name} cannot {doing}: {self._running} generation(s) run; pause it first")
