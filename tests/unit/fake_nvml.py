"""Stands in for the module pynvml: the calls that wsync makes, with the errors that the real ones raise."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
DRIVER_KEEPS = GIB // 2


class NVMLError(Exception):
    """What the real module raises; it knows its cases by number."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class NVMLLibraryMismatchError(Exception):
    """Not an `NVMLError` in the real module either."""


NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, LIBRARY_NOT_FOUND = 3, 4, 6, 12


@dataclass
class Gpu:
    """A device, or a MIG instance, that NVML knows."""

    uuid: str
    """With its prefix."""

    used: int
    processes: Sequence[tuple[int, int | None]] = ()
    """Process ids and bytes; None as the real module says it for NVML_VALUE_NOT_AVAILABLE."""

    mig: bool | None = None
    """None: this kind of GPU cannot be cut."""

    processes_fail: Exception | None = None
    memory_fails: Exception | None = None


class FakeNvml:
    """The module. A handle is the `Gpu` itself."""

    NVMLError = NVMLError
    NVMLLibraryMismatchError = NVMLLibraryMismatchError
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlMemory_v2 = 0x02000028

    def __init__(self, gpus: Sequence[Gpu], *, no_driver: bool = False) -> None:
        self._gpus, self._no_driver = list(gpus), no_driver
        self._ready = False

    def nvmlInit(self) -> None:
        if self._no_driver:
            raise NVMLError(LIBRARY_NOT_FOUND)
        self._ready = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        assert self._ready
        found = [gpu for gpu in self._gpus if gpu.uuid == uuid]
        if not found:
            raise NVMLError(NOT_FOUND)
        return found[0]

    def nvmlDeviceGetMigMode(self, handle: Gpu) -> list[int]:
        if handle.mig is None:
            raise NVMLError(NOT_SUPPORTED)
        return [int(handle.mig), int(handle.mig)]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Gpu) -> list[Any]:
        if handle.processes_fail is not None:
            raise handle.processes_fail
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.processes]

    def nvmlDeviceGetMemoryInfo(self, handle: Gpu, version: int | None = None) -> Any:
        """Version 1 counts what the driver keeps for itself as used."""
        if handle.memory_fails is not None:
            raise handle.memory_fails
        if version is None:
            return SimpleNamespace(used=handle.used + DRIVER_KEEPS)
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(used=handle.used, reserved=DRIVER_KEEPS)
