"""What the ranks of a group that forms tell each other: values by key, over the links that they have already.

A store of torch.distributed would listen at a port of its own, where nobody has to prove himself, and its clients ask
the resolver for the names of addresses, which may keep them waiting for longer than any deadline.
"""

import threading
from collections.abc import Callable

from wsync.deadline import Deadline

_LOOK_S = 0.02


class Board:
    """One rank's. For any thread."""

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        """`tell` brings a key and its value to the boards of all other ranks."""
        self._tell = tell
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def post(self, key: str, value: bytes) -> None:
        """For everybody."""
        self.put(key, value)
        self._tell(key, value)

    def put(self, key: str, value: bytes) -> None:
        """What another rank has posted."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def read(self, key: str, deadline: Deadline, check: Callable[[], None]) -> bytes:
        """What was posted as `key`, as soon as it was. Raises `SyncTimeout`, and what `check` does while it waits."""
        with self._changed:
            while key not in self._values:
                check()
                self._changed.wait(min(_LOOK_S, deadline.remaining(f"the other ranks of a group ({key})")))
            return self._values[key]
