"""What one engine worker holds, and which calls that allows.

    serving(v) --begin--> updating --loaded--> loaded --publish--> serving(v+1)
                          |  failure or abort before the first byte -> what it was before
                          |  failure or abort after it               -> torn
    torn --begin--> updating ...

Every change is made under a lock: an abort may come on another thread while an update runs.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from wsync.errors import EngineStateError

Kind = Literal["serving", "updating", "loaded", "torn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One worker at one moment."""

    kind: Kind = "serving"
    version: int = 0
    """Version published last; 0 for the launch weights. While torn no weights of it are left."""

    reason: str = ""
    """Why it is torn."""


@dataclass(slots=True)
class _Attempt:
    name: str
    version: int
    before: State
    written: bool = False
    over: bool = False
    """Given up by the trainer while the worker was still at it."""


class StateMachine:
    """The states of one worker. Every method may be called from any thread."""

    def __init__(self, on_state: Callable[[State], None]) -> None:
        """`on_state` hears of every change, on the thread that made it."""
        self._lock = threading.RLock()
        self._on_state = on_state
        self._state = State()
        self._attempt: _Attempt | None = None
        self._over: str | None = None

    @property
    def state(self) -> State:
        """The state now."""
        return self._state

    def require_idle(self, doing: str) -> None:
        """Raises `EngineStateError` while an attempt is under way."""
        if self._attempt is not None:
            raise EngineStateError(
                f"the worker is loading version {self._attempt.version} and cannot {doing} until that attempt is over"
            )

    def begin(self, version: int, attempt: str) -> None:
        """Raises `EngineStateError` if the version is not newer, or the attempt is over or another one runs."""
        with self._lock:
            self.require_idle(f"begin version {version}")
            if attempt == self._over:
                raise EngineStateError(f"attempt {attempt} at version {version} was ended before it began")
            if version <= self._state.version:
                raise EngineStateError(
                    f"version {version} is not newer than version {self._state.version}; versions only grow"
                )
            self._attempt = _Attempt(attempt, version, self._state)
            try:
                self._set(State(kind="updating", version=self._state.version))
            except BaseException as error:
                self.end(attempt, f"{type(error).__name__}: {error}")
                raise

    def check(self, attempt: str) -> None:
        """Raises `EngineStateError` if `attempt` is not the one under way: it was aborted meanwhile."""
        self._current(attempt)

    def writing(self, attempt: str) -> None:
        """The first byte is about to be written: from here on a failure leaves the worker torn."""
        with self._lock:
            self._current(attempt).written = True

    def loaded(self, attempt: str) -> None:
        """Everything has been loaded, or is queued on a device. Raises as `check`."""
        with self._lock:
            self._current(attempt)
            self._set(replace(self._state, kind="loaded"))

    def publish(self, version: int, attempt: str) -> None:
        """Serve `version`. Raises `EngineStateError` unless `attempt` is the current one and has loaded just that."""
        with self._lock:
            current = self._current(attempt)
            if self._state.kind != "loaded" or current.version != version:
                raise EngineStateError(
                    f"attempt {attempt} cannot publish version {version}: it is {self._state.kind} with version "
                    f"{current.version}"
                )
            self._attempt = None
            self._set(State(version=version))

    def abort(self, attempt: str) -> State:
        """The trainer gives `attempt` up; if it has not begun it can no longer begin. Never raises.

        An update that still runs stays `updating` until it has found out, so that no other one starts meanwhile.
        """
        with self._lock:
            self._over = attempt
            if self._attempt is not None and self._attempt.name == attempt and self._state.kind == "updating":
                self._attempt.over = True
                return self._state
            return self.end(attempt, "the trainer gave the attempt up")

    def end(self, attempt: str, reason: str) -> State:
        """The worker does nothing more for an attempt that it did not finish. Never raises."""
        with self._lock:
            self._over = attempt
            current = self._attempt
            if current is not None and current.name == attempt:
                self._attempt = None
                torn = State(kind="torn", version=current.before.version, reason=reason)
                self._set(torn if current.written else current.before)
            return self._state

    def tear(self, reason: str) -> None:
        """The weights are not fit to serve, whatever happened."""
        with self._lock:
            self._set(State(kind="torn", version=self._state.version, reason=reason))

    def _current(self, attempt: str) -> _Attempt:
        current = self._attempt
        if current is None or current.name != attempt or current.over:
            raise EngineStateError(f"attempt {attempt} is over; the worker does nothing more for it")
        return current

    def _set(self, state: State) -> None:
        self._state = state
        self._on_state(state)
