"""What the driver counts on one device, through NVML: the share of this process, and that of all others."""

import os
from typing import Any


class NvmlDevice:
    """One GPU, or one MIG instance of it. `open_nvml` makes one."""

    def __init__(self, pynvml: Any, kind: str, handle: Any) -> None:
        self.kind = kind
        """"GPU" or "MIG": how NVML begins its UUID."""
        self._pynvml, self._handle = pynvml, handle

    def shares(self) -> tuple[int | None, int | None]:
        """Bytes of the device that this process has, and bytes that all others have together; None where NVML refuses.

        Both are None where the driver does not say what this process has: in many containers with process ids of their
        own, and without the rights to see it. Others are what is taken and not this process's: inside a container the
        driver's list leaves most of them out, the sum does not.
        """
        errors = (self._pynvml.NVMLError, self._pynvml.NVMLLibraryMismatchError)
        try:
            processes = self._pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            own = {process.pid: process.usedGpuMemory for process in processes}.get(os.getpid())
        except errors:
            return None, None
        if not own:  # it has a context, which takes memory: 0 is what some drivers say to containers
            return None, None
        try:
            # Version 1 counts what the driver keeps for itself as used.
            memory = self._pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=self._pynvml.nvmlMemory_v2)
        except errors:
            return own, None
        return own, max(memory.used - own, 0)


def open_nvml(uuid: str) -> NvmlDevice | None:
    """NVML's view of the device that torch calls `uuid`. Never by index: `CUDA_VISIBLE_DEVICES` changes those.

    Args:
        uuid: as `torch.cuda.get_device_properties` has it, without "GPU-" or "MIG-".

    None without nvidia-ml-py (the extra "gpu") or with one older than 12.550, where NVML or the driver cannot
    be loaded, where it knows no such device, and where that device is a GPU that has been cut into MIG instances: the
    process has one of these and NVML does not know which.
    """
    try:
        import pynvml
        from pynvml import NVMLError, NVMLLibraryMismatchError, nvmlMemory_v2  # noqa: F401 - older ones lack them
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()  # for as long as the process lives: NVML counts its users, and ends with it
    except NVMLError:
        return None
    for kind in ("MIG", "GPU"):
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
        except NVMLError:
            continue
        return None if kind == "GPU" and _is_cut(pynvml, handle) else NvmlDevice(pynvml, kind, handle)
    return None


def _is_cut(pynvml: Any, handle: Any) -> bool:
    try:
        current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    except pynvml.NVMLError:  # not a kind of GPU that can be
        return False
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)
