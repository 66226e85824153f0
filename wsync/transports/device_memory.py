"""Device memory that processes of the same device share.

Slots are plain allocations, outside every torch allocator: what torch's allocator gives can be exported under some
settings only, and never out of an engine's own pools; memory of our own always can. It is freed, or unmapped, when the
last tensor on it is dropped.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from wsync.errors import ProtocolError, TransportError
from wsync.extras import importing
from wsync.transports.references import Segment

HANDLE_BYTES = 64

_CURE = (
    "CUDA IPC is refused by the driver or by a container. Processes in containers must share an IPC namespace "
    "(--ipc=host); where the driver has none, run the engine in the trainer's process"
)


def allocate(device: torch.device, slot_bytes: int, num_slots: int) -> tuple[bytes, torch.Tensor]:
    """A handle for other processes, and memory for `num_slots` slots: see `cut_slots`.

    Raises `TransportError` saying what is free if the memory cannot be had, or cannot be exported from here.
    """
    runtime = _runtime()
    nbytes = memory_bytes(slot_bytes, num_slots)
    with torch.cuda.device(device):
        code, address = runtime.cudaMalloc(nbytes)
        if code:  # torch keeps what was freed: that may be enough
            torch.cuda.empty_cache()
            code, address = runtime.cudaMalloc(nbytes)
        if code:
            runtime.cudaGetLastError()  # else it is the next caller's
            free, total = torch.cuda.mem_get_info()
            raise TransportError(
                f"{num_slots} slots of {slot_bytes} bytes need {nbytes} bytes on {device}; {free} of {total} bytes "
                f"were free ({_name(code)}): lower bucket_bytes or num_slots, or let the engine sleep first"
            )
        owner = _Memory(device, address, nbytes, partial(_release, device, address, runtime.cudaFree))
        code, handle = runtime.cudaIpcGetMemHandle(address)
        if code:
            runtime.cudaGetLastError()
            raise TransportError(f"device memory cannot be exported from this process: {_name(code)}. {_CURE}")
    return bytes(handle.reserved), owner.whole()


def cut_slots(memory: torch.Tensor, slot_bytes: int, num_slots: int) -> Sequence[torch.Tensor]:
    """The slots in memory of `allocate`, in any process."""
    stride = _stride(slot_bytes)
    return [memory[index * stride : index * stride + slot_bytes] for index in range(num_slots)]


def open_exported(
    device: torch.device, handle: bytes, nbytes: int, *, holder: torch.device | None = None
) -> torch.Tensor:
    """The memory behind `handle`, uint8 `[nbytes]`, mapped on `device`, from which it will be read.

    Args:
        device: that reads.
        handle: of the driver.
        nbytes: of the allocation.
        holder: the device that has the memory, as this process counts; default: `device`.

    Raises `TransportError` if the driver or the container does not allow it, or the devices cannot reach each other.
    """
    runtime, holder = _runtime(), holder or device
    if holder != device and not torch.cuda.can_device_access_peer(device, holder):
        raise TransportError(f"{device} cannot read the memory of {holder}: there is no way between these devices")
    exported = runtime.cudaIpcMemHandle_t()
    exported.reserved = handle
    with torch.cuda.device(device):
        code, address = runtime.cudaIpcOpenMemHandle(exported, runtime.cudaIpcMemLazyEnablePeerAccess)
        if code:
            runtime.cudaGetLastError()
            raise TransportError(
                f"another process's device memory cannot be mapped on {device}: {_name(code)}. {_CURE}"
            )
    return _shown(_Memory(holder, address, nbytes, partial(_release, device, address, runtime.cudaIpcCloseMemHandle)))


def own_memory(device: torch.device, address: int, nbytes: int) -> torch.Tensor:
    """Memory of this process on `device`, uint8 `[nbytes]`, whoever it belongs to: it must outlive the tensor.

    Raises `TransportError` if it is on another device.
    """
    return _shown(_Memory(device, address, nbytes, None))


def _shown(memory: "_Memory") -> torch.Tensor:
    """As a tensor. Of memory that is elsewhere torch would make a copy."""
    tensor = memory.whole()
    if tensor.data_ptr() != memory.address:
        raise TransportError(f"memory at {memory.address:#x} is not on {tensor.device}")
    return tensor


def handle_bytes(handle: object) -> bytes:
    """A handle from its hexadecimal form. Raises `ProtocolError` if it is none."""
    if not isinstance(handle, str) or len(handle) != 2 * HANDLE_BYTES:
        raise ProtocolError("a peer sent something that is not a handle of device memory or of an event")
    try:
        return bytes.fromhex(handle)
    except ValueError as error:
        raise ProtocolError("a peer sent a handle that is not hexadecimal") from error


class DeviceExporter:
    """Memory that torch's allocator gave, for other processes. See `wsync.transports.references.Exporter`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids: dict[Segment, int | None] = {}

    def segments(self, starts: Sequence[int]) -> Sequence[Segment]:
        """See `Exporter`. Allocations of expandable segments, and those of engines' pools, cannot be exported."""
        runtime, driver = _runtime(), _driver()
        known: list[Segment] = []
        found: dict[int, Segment] = {}
        with torch.cuda.device(self._device):
            for start in sorted(set(starts)):
                last = known[-1] if known else None
                if last is None or not last.start <= start < last.start + last.nbytes:
                    last = _exported(runtime, driver, start)
                    known.append(last)
                found[start] = last
            self._ids = {segment: _buffer_id(driver, segment) for segment in known}
        return [found[start] for start in starts]

    def intact(self, segments: Sequence[Segment]) -> bool:
        """See `Exporter`. Addresses come back: the driver numbers its allocations."""
        driver = _driver()
        with torch.cuda.device(self._device):
            known = [self._ids.get(segment) for segment in segments]
            return None not in known and known == [_buffer_id(driver, segment) for segment in segments]


def _exported(runtime: Any, driver: Any, start: int) -> Segment:
    """The allocation that holds address `start`."""
    code, base, nbytes = driver.cuMemGetAddressRange(start)
    handle = None
    if not code:
        code, handle = runtime.cudaIpcGetMemHandle(int(base))
    if handle is None or code:
        runtime.cudaGetLastError()
        raise TransportError(
            f"device memory at {start:#x} cannot be exported from this process: {_name(code)}. Memory of expandable "
            f"segments and of an engine's own pools never can"
        )
    return Segment(bytes(handle.reserved).hex(), int(base), int(nbytes))


def _buffer_id(driver: Any, segment: Segment) -> int | None:
    code, number = driver.cuPointerGetAttribute(
        driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, segment.start
    )
    return None if code else int(number)


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Context in which torch shares something: its error becomes a `TransportError` that says `what` failed."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise TransportError(f"{what}: {reason}. {_CURE}") from error


class _Memory:
    """An address range that torch sees as tensors; released when the last of them is gone."""

    def __init__(self, device: torch.device, address: int, nbytes: int, release: Callable[[], object] | None) -> None:
        self._device, self.address = device, address
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        if release is not None:
            weakref.finalize(self, release).atexit = False  # the driver does it then

    def whole(self) -> torch.Tensor:
        """All of it: views keep this object alive."""
        return torch.as_tensor(self, device=self._device)


def _release(device: torch.device, address: int, release: Callable[[int], object]) -> None:
    with torch.cuda.device(device):
        release(address)


def memory_bytes(slot_bytes: int, num_slots: int) -> int:
    """Bytes that `num_slots` slots take, each aligned to 256 bytes."""
    return _stride(slot_bytes) * num_slots


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // 256) * 256


def _name(code: Any) -> str:
    return str(getattr(code, "name", code))


def _runtime() -> Any:
    with importing("cuda", "cuda_ipc"):
        from cuda.bindings import runtime
    return runtime


def _driver() -> Any:
    with importing("cuda", "cuda_ipc"):
        from cuda.bindings import driver
    return driver
