"""The contract of what takes device memory for a while: a tag of an engine, a model, an optimizer's state."""

from typing import Protocol

from wsync.deadline import Deadline
from wsync.errors import MemoryStateError


class Resident(Protocol):
    """Something that is on the device or away from it. It is asked for one thing at a time."""

    name: str
    """Unique within a manager, for messages: "actor", "engine weights"."""

    @property
    def present(self) -> bool:
        """Whether it has its device memory."""
        ...

    @property
    def nbytes(self) -> int | None:
        """Bytes on the device while present; while away, what it will take. None: only measuring tells."""
        ...

    @property
    def host_nbytes(self) -> int:
        """Host memory, in bytes, that its absence takes or would take; 0 if its bytes are dropped."""
        ...

    def check_release(self) -> None:
        """Raise what `release` would refuse with, before anything has moved."""
        ...

    def check_restore(self) -> None:
        """Raise what `restore` would refuse with, before anything has moved."""
        ...

    def release(self, deadline: Deadline) -> None:
        """Give the device memory back. Raises `MemoryStateError` if it is away. After an error it is present."""
        ...

    def restore(self, deadline: Deadline) -> None:
        """Take device memory again. Raises `MemoryStateError` if it is present. After an error it is away."""
        ...


def require_present(resident: Resident) -> None:
    """Raise `MemoryStateError` if it was released and not restored."""
    if not resident.present:
        raise MemoryStateError(f"{resident.name} is away already; restore it before it is released again")


def require_away(resident: Resident) -> None:
    """Raise `MemoryStateError` unless it was released."""
    if resident.present:
        raise MemoryStateError(f"{resident.name} is present; release it before it is restored")
