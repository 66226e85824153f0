"""What trainer ranks leave in the store that all of them reach, for those whom no link reaches."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from torch.distributed.distributed_c10d import Store

from wsync import wire
from wsync.background import Background
from wsync.deadline import Deadline
from wsync.errors import SyncTimeout

T = TypeVar("T")


class Mailbox:
    """Values by key, on the trainer's own connection: nothing here waits in the store, but the trainer may.

    Another connection would ask the resolver for names, which takes longer than all else.
    """

    def __init__(self, store: Store) -> None:
        """Local. Keys of `store` are this mailbox's alone."""
        self._store = store
        self._last: Background[Any] | None = None

    def put(self, key: str, value: object) -> None:
        """Leave `value` (msgpack-able). Raises `RuntimeError` if the store is gone."""
        self._store.set(key, cast("str", wire.pack(value)))  # bytes are taken as they are; torch's stub says str

    def get(self, key: str) -> Any:
        """What was left there; None if nothing was. Raises as `put`."""
        return wire.unpack(self._store.get(key)) if self._store.check([key]) else None

    def put_soon(self, key: str, value: object, deadline: Deadline) -> None:
        """`put`. Raises `SyncTimeout` if the trainer keeps the store until `deadline`."""
        self._soon(lambda: self.put(key, value), deadline)

    def get_soon(self, keys: Sequence[str], deadline: Deadline) -> Sequence[Any]:
        """`get` for each of `keys`. Raises as `put_soon`."""
        return self._soon(lambda: [self.get(key) for key in keys], deadline)

    def drop_soon(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Leave nothing at `keys`. Raises as `put_soon`, or what a store raises that keeps all for ever."""
        self._soon(lambda: [self._store.delete_key(key) for key in keys], deadline)

    def _soon(self, work: Callable[[], T], deadline: Deadline) -> T:
        if self._last is not None and not self._last.done:
            raise SyncTimeout("the trainer keeps the store that connects its ranks")
        call = Background("the store that connects the trainer ranks", work)
        self._last = call
        return call.result(deadline)
