"""A CUDA device, as this process's allocator and the driver count its memory."""

import torch

from wsync.errors import ConfigError, UnsupportedError
from wsync.memory import host
from wsync.memory.device import Room, Usage
from wsync.memory.host_pool import pinned_bytes
from wsync.memory.nvml import open_nvml


class CudaDevice:
    """One CUDA device of this process. Meets `wsync.memory.device.Device`.

    `allocated` and `reserved` are what torch's allocator believes: memory that an engine in this process unmaps behind
    its back (as sleep does) still counts there, while `free` and `by_this_process` show it gone.
    """

    def __init__(self, device: torch.device | int | None = None) -> None:
        """Starts CUDA in this process, if nothing has yet.

        Args:
            device: which; an int is its index among those that this process sees. None: torch's current one.

        Raises `UnsupportedError` if torch sees no CUDA device, `ConfigError` if it does not see this one.
        """
        if not torch.cuda.is_available():
            raise UnsupportedError("CudaDevice needs a CUDA device and torch sees none; on a CPU, use HostDevice()")
        self._index = _index_of(device)
        properties = torch.cuda.get_device_properties(self._index)
        uuid = str(properties.uuid)
        self._nvml = open_nvml(uuid)
        kind = "GPU" if self._nvml is None else self._nvml.kind
        self.name = f"cuda:{self._index} ({properties.name}, {kind}-{uuid[:8]})"

    def describe(self) -> str:
        """See `Device`. Says whether expandable segments are on, however that was set."""
        words = {True: "on", False: "off", None: "unknown"}
        return f"{self.name}, expandable segments {words[expandable_segments(self._index)]}"

    def room(self) -> Room:
        """See `Device`."""
        free, total = torch.cuda.mem_get_info(self._index)
        stats = torch.cuda.memory_stats(self._index)
        return Room(
            total=total,
            free=free,
            allocated=stats["allocated_bytes.all.current"],
            reserved=stats["reserved_bytes.all.current"],
        )

    def usage(self) -> Usage:
        """See `Device`. NVML takes milliseconds to answer."""
        free, total = torch.cuda.mem_get_info(self._index)
        stats = torch.cuda.memory_stats(self._index)
        own, others = (None, None) if self._nvml is None else self._nvml.shares()
        return Usage(
            total=total,
            free=free,
            allocated=stats["allocated_bytes.all.current"],
            reserved=stats["reserved_bytes.all.current"],
            peak_allocated=stats["allocated_bytes.all.peak"],
            peak_reserved=stats["reserved_bytes.all.peak"],
            by_this_process=own,
            by_others=others,
            host_rss=host.resident_bytes(),
            host_pinned=pinned_bytes(),
        )

    def reset_peak(self) -> None:
        """See `Device`. What `torch.cuda.max_memory_allocated` says begins anew too: there is one count."""
        torch.cuda.reset_peak_memory_stats(self._index)

    def empty_cache(self) -> None:
        """See `Device`. torch does this for all devices of the process at once."""
        torch.cuda.empty_cache()


def expandable_segments(index: int) -> bool | None:
    """Whether PyTorch's allocator makes expandable segments on device `index` at this moment.

    As the allocator itself tells, so that both environment variables and what was set later count. None where it does
    not: it has no public call for that.
    """
    try:
        settings = torch.cuda.memory._snapshot(index)["allocator_settings"]
        return bool(settings["expandable_segments"])
    except (AttributeError, KeyError, TypeError, RuntimeError):
        return None


def _index_of(device: torch.device | int | None) -> int:
    if isinstance(device, torch.device) and device.type != "cuda":
        raise ConfigError(f"CudaDevice got {str(device)!r}; it takes a CUDA device, its index or None")
    index = device.index if isinstance(device, torch.device) else device
    if index is None:
        return torch.cuda.current_device()
    if not 0 <= index < torch.cuda.device_count():
        raise ConfigError(f"there is no cuda:{index}; this process sees {torch.cuda.device_count()} CUDA devices")
    return index
