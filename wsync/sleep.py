"""Sleep tags: which parts of an engine's device memory may leave together, and in which order they come back."""

from collections.abc import Collection, Iterable, Sequence

from wsync.errors import EngineStateError

SLEEP_TAGS = ("weights", "kv_cache")
"""In the order in which they wake."""


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
    wanted = _known(asleep if tags is None else tags)
    if "kv_cache" in wanted and "weights" in set(asleep) - wanted:
        raise EngineStateError(f"{name}: wake 'weights' before 'kv_cache'")
    return [tag for tag in SLEEP_TAGS if tag in wanted & set(asleep)]


def _known(tags: Iterable[str]) -> set[str]:
    if unknown := set(tags) - set(SLEEP_TAGS):
        raise EngineStateError(f"unknown sleep tags {sorted(unknown)}; choose from {', '.join(SLEEP_TAGS)}")
    return set(tags)
