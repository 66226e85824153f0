"""Device memory that another process of the same device can map: plain allocations, outside every torch allocator.

What torch's allocator gives can be exported under some settings only, and never out of an engine's own pools; memory
of our own always can. It is freed, or unmapped, when the last tensor on it is dropped.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from wsync.errors import TransportError
from wsync.extras import importing

HANDLE_BYTES = 64

_CURE = (
    "CUDA IPC is refused by the driver or by a container. Processes in containers must share an IPC namespace "
    "(--ipc=host); where the driver has none, run the engine in the trainer's process"
)


def allocate(device: torch.device, slot_bytes: int, num_slots: int) -> tuple[bytes, Sequence[torch.Tensor]]:
    """A handle for other processes, and `num_slots` slots: uint8 `[slot_bytes]` each, 256 bytes aligned.

    Raises `TransportError` saying what is free if the memory cannot be had, or cannot be exported from here.
    """
    runtime = _runtime()
    nbytes = _stride(slot_bytes) * num_slots
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
        owner = _Memory(device, address, nbytes, runtime.cudaFree)
        code, handle = runtime.cudaIpcGetMemHandle(address)
        if code:
            raise TransportError(f"device memory cannot be exported from this process: {_name(code)}. {_CURE}")
    return bytes(handle.reserved), owner.slots(slot_bytes, num_slots)


def open_exported(device: torch.device, handle: bytes, slot_bytes: int, num_slots: int) -> Sequence[torch.Tensor]:
    """The same slots in another process, mapped on `device`, from which they will be read.

    Raises `TransportError` if the driver or the container does not allow it.
    """
    runtime = _runtime()
    exported = runtime.cudaIpcMemHandle_t()
    exported.reserved = handle
    with torch.cuda.device(device):
        code, address = runtime.cudaIpcOpenMemHandle(exported, runtime.cudaIpcMemLazyEnablePeerAccess)
        if code:
            raise TransportError(
                f"another process's device memory cannot be mapped on {device}: {_name(code)}. {_CURE}"
            )
        owner = _Memory(device, address, _stride(slot_bytes) * num_slots, runtime.cudaIpcCloseMemHandle)
    return owner.slots(slot_bytes, num_slots)


def device_of(uuid: str) -> torch.device:
    """The device of this process that has `uuid`: indexes differ where `CUDA_VISIBLE_DEVICES` does.

    Raises `TransportError` if it is not visible here.
    """
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise TransportError(
            f"device {uuid} is not visible to this process; it sees {seen}. Start it with that device in "
            f"CUDA_VISIBLE_DEVICES, at any place"
        )
    return torch.device("cuda", seen.index(uuid))


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

    def __init__(self, device: torch.device, address: int, nbytes: int, release: Any) -> None:
        self._device = device
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
        weakref.finalize(self, _release, device, address, release).atexit = False  # the driver does it then

    def slots(self, slot_bytes: int, num_slots: int) -> Sequence[torch.Tensor]:
        """Views that keep this object alive."""
        whole = torch.as_tensor(self, device=self._device)
        starts = range(0, _stride(slot_bytes) * num_slots, _stride(slot_bytes) or 1)
        return [whole[start : start + slot_bytes] for start in starts]


def _release(device: torch.device, address: int, release: Any) -> None:
    with torch.cuda.device(device):
        release(address)


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // 256) * 256


def _name(code: Any) -> str:
    return str(getattr(code, "name", code))


def _runtime() -> Any:
    with importing("cuda", "cuda_ipc"):
        from cuda.bindings import runtime
    return runtime
