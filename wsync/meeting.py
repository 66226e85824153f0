"""Where all trainer ranks come together before calls that need a group: they count the same ones, and name it alike."""

import threading
import weakref
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from wsync.deadline import Deadline
from wsync.group import Group
from wsync.letters import Letters
from wsync.trainer_ranks import group_of, new_group

_meetings: "weakref.WeakKeyDictionary[Store, dict[tuple[str, int, int], Meeting]]" = weakref.WeakKeyDictionary()


class Meeting:
    """A group that outlives those which are made here."""

    def __init__(self, kind: str, group: Group) -> None:
        """`kind`: of the calls."""
        self._kind, self._group = kind, group
        self._coming = threading.Lock()
        self._made: list[tuple[weakref.ref[Group], Letters]] = []

    def come(self, message: object, deadline: Deadline) -> tuple[int, Sequence[object]]:
        """*Collective.* The number of this call, and every rank's `message`, by rank.

        A rank that missed a call meets the others in their next one. Raises as `Group.round`.
        """
        with self._coming:
            self._group.enter()
            replies = self._group.round(self._kind, message, deadline)
            made, self._made = self._made, []
            for ref, letters in made:
                if (group := ref()) is None or group.closed:
                    letters.withdraw()  # all ranks are here, and in no call of that group any more
                else:
                    self._made.append((ref, letters))
            return self._group.call, replies

    def group(self, number: int, store: Store | None, timeout_s: float) -> Group:
        """The group of the call `number`, in the `store` of this meeting."""
        made = group_of(self._group.rank, self._group.world_size, store, f"{self._kind}/{number}", timeout_s)
        if made.letters is not None:
            self._made.append((weakref.ref(made), made.letters))
        return made


def meeting(kind: str, rank: int, world_size: int, store: Store | None, timeout_s: float) -> Meeting:
    """The meeting of these ranks before calls of a `kind`: the same one for as long as `store` is the same object."""
    if store is None:
        return Meeting(kind, Group(rank, world_size, None, timeout_s))
    here = _meetings.setdefault(store, {})
    key = kind, rank, world_size
    if key not in here:
        here[key] = Meeting(kind, new_group(f"meeting/{kind}", timeout_s, rank, world_size, store))
    return here[key]
