"""What every engine shares about sleep: which device memory leaves together, and in which order it comes back.

level 0: nothing leaves, nothing is generated; what is in flight goes on at wake-up
level 1: weights and KV cache leave, the weights stay in host memory; with tags, the KV cache alone
level 2: weights and KV cache are dropped; after waking up only a full sync makes the engine serve
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence

from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.errors import EngineStateError, SyncTimeout, UnsupportedError

SLEEP_TAGS = ("weights", "kv_cache")
"""Of device memory, in the order in which they wake."""

SCHEDULING = "scheduling"
"""The tag of what sleeps at level 0."""

_WAKING_TAGS = (*SLEEP_TAGS, SCHEDULING)
"""All that there are, in the order in which they wake."""


class SleepingEngine(ABC):
    """The part of `wsync.engine.WorkerEngine` that knows what is asleep."""

    name: str

    def __init__(self) -> None:
        self._asleep: set[str] = set()
        self._void = False  # awake or not, it has no weights
        self._resume_at_wake = False

    # What an adapter provides.

    @abstractmethod
    def on_sleep(self, level: int, deadline: Deadline) -> None:
        """Release memory. If this raises, none was released; after `SyncTimeout` it may be."""

    @abstractmethod
    def on_wake_up(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Take memory back for `tags`, all of which are asleep."""

    def check_release_cache(self) -> None:
        """Raise why this engine has no `on_release_cache`, which is the default."""
        raise UnsupportedError(f"{self.name} cannot release its KV cache and keep its weights")

    def on_release_cache(self, deadline: Deadline) -> None:
        """Release the memory of the KV cache alone. Raises as `on_sleep`."""
        self.check_release_cache()

    # The Engine protocol.

    @property
    def asleep(self) -> Collection[str]:
        """Tags of what is away, or stands still."""
        return frozenset(self._asleep)

    def check_sleep(self, tags: Sequence[str] | None = None) -> None:
        """Raise what `sleep` would refuse those tags with, before anything changes."""
        if self._is_updating:
            raise EngineStateError(f"{self.name} is taking new weights and cannot sleep now")
        if "weights" not in leaving_tags(self.name, tags, self._asleep):
            self.check_release_cache()

    def sleep(self, level: int = 2, tags: Sequence[str] | None = None) -> None:
        """Release device memory. Level 1 keeps the weights in host memory, level 2 drops them.

        With `tags=["kv_cache"]` the weights stay where they are, whatever the level. Level 0 releases nothing: requests
        are frozen, and go on when it wakes up. Raises `UnsupportedError` for an engine that cannot freeze any.
        """
        if level not in (0, 1, 2):
            raise EngineStateError(
                f"sleep level {level} does not exist; 0 keeps all memory, 1 keeps the weights, 2 drops them"
            )
        if level == 0:
            self._stand_still(tags)
            return
        self.check_sleep(tags)
        leaving = leaving_tags(self.name, tags, self._asleep)
        if leaving <= self._asleep:
            return
        self.last_version()  # a worker without weights may be unable to tell
        before, self._asleep = self._void, leaving
        self._void = before or (level == 2 and "weights" in leaving)
        self.guard(self._reason_not_to_serve())  # before the memory goes
        try:
            if "weights" in leaving:
                self.on_sleep(level, self._patience())
            else:
                self.on_release_cache(self._patience())
        except SyncTimeout:
            raise  # it may fall asleep yet: it counts as asleep
        except BaseException:
            self._asleep, self._void = set(), before
            self.guard(self._reason_not_to_serve())
            raise

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back by tag, `weights` before `kv_cache`. After level 2 only a full sync makes it serve."""
        waking = waking_tags(self.name, tags, self._asleep)
        if not waking:
            return
        if away := [tag for tag in waking if tag != SCHEDULING]:
            self.on_wake_up(away, self._patience())
        self._asleep -= set(waking)
        self.guard(self._reason_not_to_serve())
        if self._resume_at_wake and not self._asleep:
            self._resume_at_wake = False
            self._go_on()

    def _stand_still(self, tags: Sequence[str] | None) -> None:
        if tags is not None:
            raise EngineStateError(f"{self.name}: sleep level 0 releases no memory; it takes no tags")
        if self._asleep == {SCHEDULING}:
            return
        if self._asleep or self._is_updating:
            doing = (
                "is taking new weights" if self._is_updating else f"sleeps already ({', '.join(sorted(self._asleep))})"
            )
            raise EngineStateError(f"{self.name} {doing} and cannot go to sleep level 0")
        serving = self._reason_not_to_serve() is None
        try:
            self.pause("keep", self._patience())
        except SyncTimeout:  # it may stand still yet: it counts as asleep
            self._fall_asleep_standing(serving)
            raise
        self._fall_asleep_standing(serving)

    def _fall_asleep_standing(self, serving: bool) -> None:
        """Whoever was torn, void or paused before stays so when it wakes up."""
        self._asleep, self._resume_at_wake = {SCHEDULING}, serving
        self.guard(self._reason_not_to_serve())

    # What the rest of the engine provides.

    @property
    @abstractmethod
    def _is_updating(self) -> bool:
        """Whether a sync is under way, or a worker has not answered an earlier one."""

    @abstractmethod
    def last_version(self) -> int: ...

    @abstractmethod
    def guard(self, reason: str | None) -> None: ...

    @abstractmethod
    def pause(self, mode: PauseMode, deadline: Deadline) -> None: ...

    @abstractmethod
    def _patience(self) -> Deadline: ...

    @abstractmethod
    def _reason_not_to_serve(self) -> str | None: ...

    @abstractmethod
    def _go_on(self) -> None: ...


def leaving_tags(name: str, tags: Iterable[str] | None, asleep: Collection[str]) -> set[str]:
    """What shall sleep: all, or the KV cache alone. Raises `EngineStateError` for anything else.

    Args:
        name: of the engine, for messages.
        tags: None: all.
        asleep: tags that are away.
    """
    leaving = _known(SLEEP_TAGS if tags is None else tags)
    if leaving == {"weights"}:
        raise EngineStateError(f"{name}: a KV cache without weights serves nothing; name both, or 'kv_cache' alone")
    if asleep and not leaving <= set(asleep):
        raise EngineStateError(f"{name} is half awake; wake_up {sorted(asleep)} before the next sleep")
    return leaving


def waking_tags(name: str, tags: Iterable[str] | None, asleep: Collection[str]) -> Sequence[str]:
    """Those that are away of what shall wake, in order. Raises `EngineStateError` for a cache before the weights."""
    wanted = _known(asleep if tags is None else tags, _WAKING_TAGS)
    if "kv_cache" in wanted and "weights" in set(asleep) - wanted:
        raise EngineStateError(f"{name}: wake 'weights' before 'kv_cache'")
    return [tag for tag in _WAKING_TAGS if tag in wanted & set(asleep)]


def _known(tags: Iterable[str], known: Sequence[str] = SLEEP_TAGS) -> set[str]:
    if unknown := set(tags) - set(known):
        raise EngineStateError(f"unknown sleep tags {sorted(unknown)}; choose from {', '.join(known)}")
    return set(tags)
