"""One rank of a communicator of NCCL's, which never blocks and never outlives its thread."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from wsync.errors import TransportError
from wsync.transports.nccl_library import IN_PROGRESS, SUCCESS

Span = tuple[int, int, int]
"""A peer, the first address of device memory, and its bytes."""

_POLL_S = 2e-5


class Functions(Protocol):
    """What it needs of `wsync.transports.nccl_library.Library`."""

    def begin(self, key: bytes, rank: int, size: int) -> tuple[int, int]: ...
    def state(self, communicator: int) -> int: ...
    def broadcast(self, communicator: int, start: int, nbytes: int, stream: int) -> int: ...
    def send(self, communicator: int, peer: int, start: int, nbytes: int, stream: int) -> int: ...
    def receive(self, communicator: int, peer: int, start: int, nbytes: int, stream: int) -> int: ...
    def start_group(self) -> int: ...
    def end_group(self) -> int: ...
    def abort(self, communicator: int) -> None: ...
    def words(self, code: int, communicator: int) -> str: ...


class Communicator:
    """For one thread. `check` is called wherever it waits for other ranks, and ends the wait by raising."""

    def __init__(self, library: Functions, key: bytes, rank: int, size: int, check: Callable[[], None]) -> None:
        """Wait for all ranks, on the current device. Raises `TransportError` with NCCL's words, and what `check` does.

        Nothing is left then.
        """
        self._library, self._check = library, check
        code, self._address = library.begin(key, rank, size)
        try:
            self._settle(code, "a communicator cannot be made")
        except BaseException:
            self.abort()
            raise

    def broadcast(self, start: int, nbytes: int, stream: int) -> None:
        """Queue a broadcast of device memory from rank 0, in place. When it returns it is in the stream."""
        self._settle(self._library.broadcast(self._address, start, nbytes, stream), "a broadcast cannot begin")

    def exchange(self, sends: Sequence[Span], receives: Sequence[Span], stream: int) -> None:
        """Queue all of it as one operation, on the current device. When it returns it is in the stream."""
        library, codes = self._library, [self._library.start_group()]
        try:
            codes += [library.send(self._address, *span, stream) for span in sends]
            codes += [library.receive(self._address, *span, stream) for span in receives]
        finally:  # else all that this thread asks of NCCL from now on, the trainer's own too, would be in the group
            ended = library.end_group()
        failed = [code for code in codes if code not in (SUCCESS, IN_PROGRESS)]
        self._settle(failed[0] if failed else ended, "an exchange cannot begin")

    def look(self) -> None:
        """Raises `TransportError` if a peer or the network has failed meanwhile."""
        if (state := self._library.state(self._address)) not in (SUCCESS, IN_PROGRESS):
            raise self._error("what was queued failed", state)

    def abort(self) -> None:
        """End whatever runs on the device and give its memory back. Twice is nothing."""
        address, self._address = self._address, 0
        if address:
            self._library.abort(address)

    def _settle(self, code: int, what: str) -> None:
        while code == IN_PROGRESS:
            code = self._library.state(self._address)
            if code == IN_PROGRESS:
                self._check()
                time.sleep(_POLL_S)
        if code != SUCCESS:
            raise self._error(what, code)

    def _error(self, what: str, code: int) -> TransportError:
        return TransportError(f"NCCL: {what}: {self._library.words(code, self._address)}")
