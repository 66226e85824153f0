"""The device memory of an engine, by tag: all of it leaves at once, or the KV cache alone; it comes back tag by tag."""

from collections.abc import Sequence

from wsync.deadline import Deadline
from wsync.errors import MemoryStateError
from wsync.protocols import Engine
from wsync.sleep import SLEEP_TAGS


class EngineTag:
    """One tag of one engine. Meets `wsync.memory.Resident`.

    Releasing one puts the whole engine to sleep, and all of its tags are away then, unless it leaves alone.
    """

    def __init__(self, engine: Engine, prefix: str, tag: str, level: int, *, alone: bool = False) -> None:
        """Args:
        engine: whose.
        prefix: of the name.
        tag: one of `SLEEP_TAGS`.
        level: of sleep: 1 keeps the weights in host memory, 2 drops them.
        alone: whether the other tag stays when this one leaves; it is the KV cache then.
        """
        self.name = f"{prefix} {tag}"
        self._engine, self._tag, self._level, self._alone = engine, tag, level, alone

    @property
    def present(self) -> bool:
        """See `Resident`."""
        return self._tag not in self._engine.asleep

    @property
    def nbytes(self) -> None:
        """See `Resident`: nobody asks an engine."""

    @property
    def host_nbytes(self) -> int:
        """See `Resident`: what level 1 keeps belongs to the engine."""
        return 0

    def check_release(self) -> None:
        """Raises `MemoryStateError` if a part of the engine is away: it cannot fall asleep then.

        Alone also what `Engine.check_sleep` raises, `UnsupportedError` for an engine that has no such sleep.
        """
        if self._alone:
            self._engine.check_sleep([self._tag])
            return
        asleep = self._engine.asleep
        if asleep and self._tag not in asleep:
            raise MemoryStateError(
                f"{self.name} cannot leave while {', '.join(sorted(asleep))} of {self._engine.name} is away: an "
                f"engine falls asleep as a whole; enter a phase that has all of it first"
            )

    def check_restore(self) -> None:
        """Nothing to check: what the engine refuses it refuses by itself, before it moves anything."""

    def release(self, deadline: Deadline) -> None:
        """See `Resident`."""
        if not self.present:
            raise MemoryStateError(f"{self.name} is away already")
        self.check_release()
        if self._alone:
            self._engine.sleep(self._level, [self._tag])
        else:
            self._engine.sleep(self._level)

    def restore(self, deadline: Deadline) -> None:
        """See `Resident`."""
        if self.present:
            raise MemoryStateError(f"{self.name} is on the device already")
        self._engine.wake_up([self._tag])


def engine_tags(engine: Engine, prefix: str, level: int) -> Sequence[EngineTag]:
    """All tags of `engine`, in the order in which they wake."""
    return [EngineTag(engine, prefix, tag, level) for tag in SLEEP_TAGS]
