"""Why ranks failed, left in the store for those whom no link tells: they have not met, or come when it is gone."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from wsync.deadline import Deadline
from wsync.errors import PeerError, RankError, SyncTimeout
from wsync.mailbox import Mailbox

_STORE_S = 2.0
"""How long the store is waited for, where that is not what a rank is here for."""


class Letters:
    """One for each call that this rank gave up, until all ranks have come to a later one.

    Attributes:
        mailbox: where they lie.
    """

    def __init__(self, mailbox: Mailbox, rank: int, world_size: int) -> None:
        """Local."""
        self.mailbox = mailbox
        self._rank, self._world_size = rank, world_size
        self._left: set[int] = set()

    def leave(self, call: int, words: str, error: BaseException) -> None:
        """Say why this rank gave `call` up. Of a `RankError` or `PeerError` another rank may have more to say.

        Raises as `Mailbox.put_soon`.
        """
        self._left.add(call)
        own = not isinstance(error, (RankError, PeerError))
        letter = {"words": words, "of another": isinstance(error, RankError), "own": own}
        self.mailbox.put_soon(_key(call, self._rank), letter, Deadline.after(_STORE_S))
        self.mailbox.put_soon(_flag(call), True, Deadline.after(_STORE_S))

    def words(self, call: int, ranks: Sequence[int]) -> Mapping[int, object]:
        """Why those of `ranks` failed that left word about `call`, or another of which they tell."""
        found = self._read(call, ranks)
        if found and all(letter["of another"] for letter in found.values()):
            found = self._read(call, range(self._world_size))
        own = {rank: letter for rank, letter in found.items() if not letter["of another"]}
        return {rank: letter["words"] for rank, letter in (own or found).items()}

    def heard(self, call: int) -> Mapping[int, object]:
        """`words` of all ranks. While nobody left any it costs one question, however many ranks there are."""
        with suppress(RuntimeError, SyncTimeout):
            if any(self.mailbox.get_soon([_flag(call)], Deadline.after(_STORE_S))):
                return self.words(call, range(self._world_size))
        return {}

    def reasons(self, call: int) -> Mapping[int, object]:
        """Why ranks gave `call` up that had a reason of their own."""
        found = self._read(call, range(self._world_size))
        return {rank: letter["words"] for rank, letter in found.items() if letter["own"]}

    def withdraw(self, before: float = math.inf) -> None:
        """Take back what this rank left about calls before that one, in which nobody is any more. Never raises."""
        if over := [call for call in self._left if call < before]:
            self._left.difference_update(over)
            with suppress(Exception):  # then they stay: nothing is wrong with that
                keys = [key for call in over for key in (_key(call, self._rank), _flag(call))]
                self.mailbox.drop_soon(keys, Deadline.after(_STORE_S))

    def _read(self, call: int, ranks: Sequence[int]) -> Mapping[int, Mapping[str, object]]:
        letters: Sequence[Any] = ()
        with suppress(RuntimeError, SyncTimeout):
            letters = self.mailbox.get_soon([_key(call, rank) for rank in ranks], Deadline.after(_STORE_S))
        return {rank: letter for rank, letter in zip(ranks, letters, strict=False) if letter is not None}


def _flag(call: int) -> str:
    return f"failed/{call}"


def _key(call: int, rank: int) -> str:
    return f"failed/{call}/{rank}"
