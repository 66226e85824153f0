"""Who may use an engine now: its own program, or a sync that comes from elsewhere."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from wsync.deadline import Deadline
from wsync.errors import EngineStateError


class Gate:
    """The program enters for each use; a trainer closes the gate, waits until nobody is inside, and holds it.

    Parts of one replica run the same uses in the same order. A trainer that stops all of them closes every gate first,
    learns how many uses each has begun, and lets each go on to the highest of these numbers: else one part would wait
    inside a use for another that is held before it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._entered = 0
        self._limit: int | None = None
        self._holder: object = None
        self._cancelled = False

    @contextmanager
    def using(self) -> Iterator[None]:
        """One use by the program. Waits while a trainer holds the gate."""
        with self._changed:
            self._changed.wait_for(lambda: self._limit is None or self._entered < self._limit)
            self._inside += 1
            self._entered += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self, holder: object) -> int:
        """No further use begins. Returns how many have begun. Raises `EngineStateError` if another one holds it."""
        with self._changed:
            if self._holder not in (None, holder):
                raise EngineStateError("another trainer is syncing this engine; one does it at a time")
            self._holder, self._cancelled = holder, False
            self._limit = self._entered
            return self._entered

    def hold(self, holder: object, uses: int, deadline: Deadline) -> None:
        """Let uses begin up to number `uses`, and wait until that is so and nobody is inside. `shut` comes first.

        Raises `SyncTimeout`, or `EngineStateError` after `cancel`; then the gate is still shut.
        """
        with self._changed:
            if self._holder is not holder:
                raise EngineStateError("the gate is not shut; shut it before holding it")
            self._limit = max(uses, self._entered)
            self._changed.notify_all()
            while self._inside or self._entered < self._limit:
                if self._cancelled:
                    raise EngineStateError("the trainer gave up while the engine was in use")
                self._changed.wait(deadline.remaining("the engine's own program to finish with it"))

    def holds(self, holder: object) -> bool:
        """Whether `holder` has shut the gate."""
        return self._holder is holder

    def cancel(self, holder: object) -> None:
        """End the wait of `hold`, from another thread."""
        with self._changed:
            if self._holder is holder:
                self._cancelled = True
                self._changed.notify_all()

    def open(self, holder: object) -> None:
        """Uses begin again, if it is `holder` who shut the gate."""
        with self._changed:
            if self._holder is holder:
                self._holder, self._limit = None, None
                self._changed.notify_all()
