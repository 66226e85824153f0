"""A `WorkerEngine` whose two workers only answer what they are told to."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from wsync import wire
from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.engine import WorkerEngine
from wsync.errors import PeerError, UnsupportedError

ERROR = {"type": "ValueError", "message": "no room", "traceback": "Traceback: line 7"}


class FakeEngine(WorkerEngine):
    """Two workers. `answers[method]` are their replies, an exception that the call raises, or give these."""

    name = "fake"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.waits: dict[str, float | None] = {}
        self.hooks: list[str] = []
        self.reason: str | None = None
        self.hold = threading.Event()
        self.hold.set()
        self.answers: dict[str, Any] = {
            "read": [{"data": b"", "nbytes": 0, "dtype": torch.float32, "shape": (0,)}] * 2,
            "hello": [{"version": 0, "state": "serving", "endpoint": None}] * 2,
            "update": updates({"a": 1}, {"a": 2}),
            "publish": [{"read_seconds": 0.0}, {"read_seconds": 0.0}],
            "abort": [{}, {}],
            "describe": [{"manifest": "m0"}, {"manifest": "m1"}],
            "attach": [{}, {}],
            "detach": [{}, {}],
        }

    def call(self, method: str, payload: bytes, timeout_s: float | None) -> Sequence[bytes]:
        self.calls.append(method)
        self.waits[method] = timeout_s
        if method == "update":
            assert self.hold.wait(30)
        answer = self.answers[method]
        if callable(answer):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        return [wire.pack(reply if isinstance(reply, bytes) or "error" in reply else {"ok": reply}) for reply in answer]

    def guard(self, reason: str | None) -> None:
        self.reason = reason

    def on_pause(self, mode: PauseMode, deadline: Deadline) -> None:
        assert self.reason is not None, "new work would be taken while the old is ended"
        self.hooks.append(f"pause {mode}")
        if mode == "keep":
            raise UnsupportedError("fake cannot freeze anything")

    def on_resume(self, deadline: Deadline) -> None:
        self._hook("resume", deadline)

    def on_reset_cache(self, deadline: Deadline) -> None:
        self._hook("reset", deadline)

    def on_sleep(self, level: int, deadline: Deadline) -> None:
        assert self.reason is not None, "memory goes away under an engine that still serves"
        self._hook(f"sleep {level}", deadline)

    def on_wake_up(self, tags: Sequence[str], deadline: Deadline) -> None:
        self._hook(f"wake {'+'.join(tags)}", deadline)

    def _hook(self, name: str, deadline: Deadline) -> None:
        self.hooks.append(name)
        self.waits[name] = deadline.timeout_s

    def sync(self, version: int) -> None:
        attempt = f"attempt {version}"
        self.begin(version, attempt, soon(), digest=True)
        self.join(soon())
        self.finish(version, attempt, soon())


def updates(*digests: Mapping[str, int]) -> list[dict[str, object]]:
    """What workers answer to "update"."""
    return [{"digests": each, "seconds": {"wait": 0.5, "load": 0.25, "finish": 0.125}} for each in digests]


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds)


def fail_update(engine: FakeEngine) -> None:
    """Begin attempt "a" for version 1; its second worker fails."""
    engine.answers["update"] = [*updates({}), {"error": ERROR}]
    engine.version()
    engine.begin(1, "a", soon(), digest=False)
    with pytest.raises(PeerError, match="worker 1 of fake failed in 'update': ValueError: no room") as caught:
        engine.join(soon())
    assert "line 7" in caught.value.remote_traceback
