"""A device that only counts: what is on it, who put it there, and how much there ever was at once."""

from wsync.deadline import Deadline
from wsync.errors import MemoryStateError
from wsync.memory.device import Room, Usage


class FakeDevice:
    """Meets `wsync.memory.Device`. What tensors free stays reserved until the cache is emptied, as with torch.

    Attributes:
        name: for messages.
        tensors: owner -> bytes of this process's tensors.
        engines: owner -> bytes that an engine took from the device by itself.
        log: what was asked for, in order.
        peak: the most bytes that were in use at once since `reset_peak`.
        peaks: what `peak` was at each `reset_peak`.
    """

    name = "fake"

    def __init__(self, total: int, others: int = 0) -> None:
        """Args:
        total: bytes of the device.
        others: bytes of it that other processes have.
        """
        self.total, self.others = total, others
        self.tensors: dict[str, int] = {}
        self.engines: dict[str, int] = {}
        self.log: list[str] = []
        self.peaks: list[int] = []
        self.peak = self._reserved = 0

    def take(self, owner: str, nbytes: int, *, engine: bool = False) -> None:
        """Allocate. Raises `MemoryError` if the device is full."""
        allocated = sum(self.tensors.values())
        more = nbytes if engine else max(allocated + nbytes - self._reserved, 0)
        if more > self.free:
            raise MemoryError(f"{owner} asks for {nbytes} bytes; {self.free} of {self.total} are free")
        (self.engines if engine else self.tensors)[owner] = nbytes
        if not engine:
            self._reserved = max(self._reserved, allocated + nbytes)
        self.peak = max(self.peak, sum(self.tensors.values()) + sum(self.engines.values()))
        self.log.append(f"take {owner}")

    def give(self, owner: str) -> None:
        """Free."""
        (self.engines if owner in self.engines else self.tensors).pop(owner)
        self.log.append(f"give {owner}")

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return self.total - self.others - self._reserved - sum(self.engines.values())

    def describe(self) -> str:
        """See `Device`."""
        return self.name

    def room(self) -> Room:
        """See `Device`."""
        return self.usage()

    def usage(self) -> Usage:
        """See `Device`."""
        allocated = sum(self.tensors.values())
        return Usage(
            total=self.total,
            free=self.free,
            allocated=allocated,
            reserved=self._reserved,
            peak_allocated=self.peak,
            peak_reserved=self.peak,
            by_this_process=self._reserved + sum(self.engines.values()),
            by_others=self.others,
            host_rss=0,
            host_pinned=0,
        )

    def reset_peak(self) -> None:
        """See `Device`."""
        self.peaks.append(self.peak)
        self.peak = sum(self.tensors.values()) + sum(self.engines.values())

    def empty_cache(self) -> None:
        """See `Device`."""
        self._reserved = sum(self.tensors.values())
        self.log.append("empty cache")


class FakeResident:
    """Meets `wsync.memory.Resident`: bytes on a `FakeDevice`, there from the start."""

    def __init__(self, device: FakeDevice, name: str, nbytes: int) -> None:
        """`name`: unique on the device."""
        self.name, self._device, self._nbytes = name, device, nbytes
        device.take(name, nbytes)

    @property
    def present(self) -> bool:
        """See `Resident`."""
        return self.name in self._device.tensors

    @property
    def nbytes(self) -> int:
        """See `Resident`."""
        return self._nbytes

    @property
    def host_nbytes(self) -> int:
        """See `Resident`."""
        return self._nbytes

    def check_release(self) -> None:
        """Nothing to check."""

    def check_restore(self) -> None:
        """Nothing to check."""

    def release(self, deadline: Deadline) -> None:
        """See `Resident`."""
        if not self.present:
            raise MemoryStateError(f"{self.name} is away already")
        self._device.give(self.name)

    def restore(self, deadline: Deadline) -> None:
        """See `Resident`."""
        if self.present:
            raise MemoryStateError(f"{self.name} is on the device already")
        self._device.take(self.name, self._nbytes)
