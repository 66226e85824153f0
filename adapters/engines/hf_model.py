"""What the embedded engine does where the model lives: generate, refuse, sleep, and answer for its weights."""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wsync.adapters.engines.hf_adapter import entrances, loader_for
from wsync.adapters.engines.hf_memory import Released, release
from wsync.errors import EngineStateError
from wsync.worker import Worker


class Gate:
    """A forward pre-hook that raises `EngineStateError(reason)` while there is a reason.

    Has no reference to the model. A copy of the model gets a gate of its own, which is open for good: nobody syncs
    the copy.
    """

    def __init__(self) -> None:
        self.reason: str | None = None

    def __call__(self, module: nn.Module, args: object) -> None:
        """Called by the module before each forward."""
        if self.reason is not None:
            raise EngineStateError(self.reason)

    def __reduce__(self) -> tuple[type["Gate"], tuple[()]]:
        return Gate, ()


class LocalModel:
    """A model of this process. Holds it weakly."""

    def __init__(self, model: nn.Module, checkpoint: Path | None = None) -> None:
        """`checkpoint`: see `loader_for`. Puts a hook on `model`."""
        self._model = weakref.ref(model)
        self._worker = Worker(loader_for(model, checkpoint))
        self._gate = Gate()
        for module in entrances(model):
            module.register_forward_pre_hook(self._gate, prepend=True)
        self._stopping = threading.Event()
        self._released: Released | None = None

    def handle(self, method: str, payload: bytes, timeout_s: float | None) -> bytes:
        """`Worker.handle` on this thread; its own waits have deadlines."""
        return self._worker.handle(method, payload)

    def generate(
        self, rows: Sequence[Sequence[int]], max_new_tokens: int, options: Mapping[str, Any], ended: Callable[[], None]
    ) -> list[list[int]]:
        """New tokens of each row; fewer after `stop(True)`. Calls `ended` when it is over, whatever the outcome."""
        try:
            return generate_rows(self._live(), rows, max_new_tokens, options, self._stopping)
        finally:
            ended()

    def stop(self, stopping: bool) -> None:
        """End running generations, and any that starts later, after their next token, until `stop(False)`."""
        if stopping:
            self._stopping.set()
        else:
            self._stopping.clear()

    def guard(self, reason: str | None) -> None:
        """Make every forward raise `EngineStateError(reason)`; None lifts that."""
        self._gate.reason = reason

    def sleep(self, level: int, timeout_s: float) -> None:
        """Free the storages of the model. Level 1 keeps copies of the weights in host memory. Waits for nobody."""
        self._released = release(self._live(), keep_weights=level == 1)

    def wake_up(self, timeout_s: float) -> None:
        """Allocate the storages again and put back what was kept. Waits for nobody."""
        if self._released is not None:
            self._released.restore()
            self._released = None

    def shutdown(self) -> None:
        """Nothing to end: the model belongs to someone else."""

    def _live(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise EngineStateError("the model of this engine no longer exists; keep a reference to it")
        return model


def generate_rows(
    model: nn.Module,
    rows: Sequence[Sequence[int]],
    max_new_tokens: int,
    options: Mapping[str, Any],
    stopping: threading.Event,
) -> list[list[int]]:
    """Call `model.generate` on left-padded `rows`; each row's new tokens up to and with its end-of-sequence token."""
    eos = _ids(_setting(model, options, "eos_token_id"))
    pad = _setting(model, options, "pad_token_id")
    pad = pad if pad is not None else min(eos, default=0)
    width = max(len(row) for row in rows)
    device = next(model.parameters()).device
    tokens = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)

    def stop(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return torch.full((len(input_ids),), stopping.is_set(), device=input_ids.device)

    settings = {"do_sample": False, **options, "pad_token_id": pad}
    criteria = [*settings.pop("stopping_criteria", ()), stop]
    output: torch.Tensor = model.generate(  # type: ignore[operator]
        tokens, attention_mask=mask, max_new_tokens=max_new_tokens, stopping_criteria=criteria, **settings
    )
    return [_cut(row, eos) for row in output[:, width:].tolist()]


def _setting(model: nn.Module, options: Mapping[str, Any], name: str) -> Any:
    return options[name] if name in options else getattr(getattr(model, "generation_config", None), name, None)


def _ids(value: Any) -> set[int]:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def _cut(row: list[int], eos: set[int]) -> list[int]:
    end = next((index + 1 for index, token in enumerate(row) if token in eos), len(row))
    return row[:end]
