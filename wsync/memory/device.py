"""The contract of a device's memory: how much of it is taken, and by whom."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is taken and what is not, at one moment. All numbers are bytes."""

    total: int
    """Of the device."""

    free: int
    """Of the device, to whoever asks first: what no process has taken."""

    allocated: int
    """In tensors of this process."""

    reserved: int
    """Taken from the device by this process's allocator: `allocated`, and what it keeps for later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage(Room):
    """The same, what was the most, and who has it; None where nothing on this machine can tell."""

    peak_allocated: int
    """The most that `allocated` was since the last `Device.reset_peak`."""

    peak_reserved: int
    """The most that `reserved` was since then."""

    by_this_process: int | None
    """Of the device, as its driver counts: tensors of every library, code and contexts."""

    by_others: int | None
    """Of the device, by all other processes together."""

    host_rss: int
    """Host memory of this process."""

    host_pinned: int
    """Host memory that wsync has pinned for copies."""


class Device(Protocol):
    """Memory that tensors are put in."""

    name: str
    """What people call it: "cuda:0 (NVIDIA H200, GPU-3f2a...)"."""

    def describe(self) -> str:
        """`name`, and what is set for its allocator that matters to others."""
        ...

    def room(self) -> Room:
        """Measure now. Waits for nothing that runs on the device, and asks nobody who takes long to answer."""
        ...

    def usage(self) -> Usage:
        """Measure now, as closely as can be. Waits for nothing that runs on the device."""
        ...

    def reset_peak(self) -> None:
        """Count peaks from here on."""
        ...

    def empty_cache(self) -> None:
        """Give back what the allocator of this process keeps for later."""
        ...
