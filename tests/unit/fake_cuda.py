"""Stands in for CUDA, as far as the transport over CUDA IPC goes: memory, handles and events, and how they are refused.

Codes are those of the real runtime, given back in tuples as `cuda.bindings` does. Memory is the host's, so that bytes
do arrive.
"""

import ctypes
import sys
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import pytest
import torch

GIB = 1 << 30
UUIDS = ("11111111-0000-0000-0000-000000000000", "22222222-0000-0000-0000-000000000000")


class Code(IntEnum):
    """`cudaError_t`."""

    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorMapBufferObjectFailed = 205
    cudaErrorNotSupported = 801


class Handle:
    """`cudaIpcMemHandle_t`."""

    reserved = b""


class Runtime(ModuleType):
    """`cuda.bindings.runtime` and the devices behind it.

    Attributes:
        refused: function -> the code that it gives.
        free: bytes that can be had.
        cached: bytes more, once torch has emptied its cache.
        opens_events: how many events of other processes can be opened.
        allocated, mapped: address -> bytes, what is held now.
        ids: address -> the number of the allocation there.
        opened_on: indexes of the devices that handles were opened on.
        visible: UUIDs in the order of this process.
        peers: whether the devices can read each other.
        is_done: whether a device has done what was queued on it.
    """

    cudaIpcMemHandle_t = Handle
    cudaIpcMemLazyEnablePeerAccess = 1

    def __init__(self) -> None:
        super().__init__("cuda.bindings.runtime")
        self.refused: dict[str, Code] = {}
        self.free, self.cached, self.total = GIB, 0, 2 * GIB
        self.opens_events = 1000
        self.is_done: Callable[[], bool] = lambda: True
        self.allocated: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.opened_on: list[int] = []
        self.visible = list(UUIDS)
        self.peers = True
        self.current = 0
        self.last = Code.cudaSuccess
        self.ids: dict[int, int] = {}
        self._memory: dict[int, Any] = {}
        self._openings = Counter[int]()

    def cudaMalloc(self, nbytes: int) -> tuple[Code, int | None]:
        code = self.refused.get("cudaMalloc", Code.cudaSuccess)
        if code or nbytes > self.free:
            self.last = code or Code.cudaErrorMemoryAllocation
            return self.last, None
        memory = (ctypes.c_uint8 * nbytes)()
        address = ctypes.addressof(memory)
        self._memory[address] = memory
        self.allocated[address] = nbytes
        self.ids[address] = len(self.ids)
        self.free -= nbytes
        return Code.cudaSuccess, address

    def cudaFree(self, address: int) -> tuple[Code]:
        self.free += self.allocated.pop(address)
        return (Code.cudaSuccess,)

    def cudaGetLastError(self) -> tuple[Code]:
        last, self.last = self.last, Code.cudaSuccess
        return (last,)

    def cudaIpcGetMemHandle(self, address: int) -> tuple[Code, Handle | None]:
        if code := self.refused.get("cudaIpcGetMemHandle"):
            self.last = code
            return code, None
        handle = Handle()
        handle.reserved = address.to_bytes(32, "little") + self.ids[address].to_bytes(32, "little")
        return Code.cudaSuccess, handle

    def cudaIpcOpenMemHandle(self, handle: Handle, flags: int) -> tuple[Code, int | None]:
        address = int.from_bytes(handle.reserved[:32], "little")
        code = self.refused.get("cudaIpcOpenMemHandle", Code.cudaSuccess)
        if code or address not in self.allocated:
            return code or Code.cudaErrorInvalidValue, None
        self.opened_on.append(self.current)
        self.mapped[address] = self.allocated[address]
        self._openings[address] += 1
        return Code.cudaSuccess, address

    def cudaIpcCloseMemHandle(self, address: int) -> tuple[Code]:
        self._openings[address] -= 1
        if not self._openings[address]:
            del self.mapped[address]
        return (Code.cudaSuccess,)


class Driver(ModuleType):
    """`cuda.bindings.driver`, over the memory of a `Runtime`."""

    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_BUFFER_ID=7)

    def __init__(self, runtime: Runtime) -> None:
        super().__init__("cuda.bindings.driver")
        self._runtime = runtime

    def cuMemGetAddressRange(self, address: int) -> tuple[Code, int | None, int | None]:
        for start, nbytes in self._runtime.allocated.items():
            if start <= address < start + nbytes:
                return Code.cudaSuccess, start, nbytes
        return Code.cudaErrorInvalidValue, None, None

    def cuPointerGetAttribute(self, attribute: int, address: int) -> tuple[Code, int | None]:
        code, start, _ = self.cuMemGetAddressRange(address)
        return code, None if start is None else self._runtime.ids[start]


class Device:
    """`torch.cuda.device`."""

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self._runtime, self._index = runtime, device.index or 0

    def __enter__(self) -> None:
        self._before, self._runtime.current = self._runtime.current, self._index

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        self._runtime.current = self._before


class Stream:
    """The one stream that there is."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def wait_event(self, event: object) -> None:
        """What waits on it is never asked."""

    def record_event(self) -> Any:
        """Happens as the runtime says."""
        return SimpleNamespace(query=self._runtime.is_done)


def events_of(runtime: Runtime) -> type[Any]:
    """`torch.cuda.Event`, which raises where the runtime gives codes."""

    class Event:
        def __init__(self, interprocess: bool = False, enable_timing: bool = False) -> None:
            assert interprocess is not enable_timing

        def record(self, stream: object = None) -> None:
            pass

        def ipc_handle(self) -> bytes:
            _raise(runtime.refused.get("cudaIpcGetEventHandle"))
            return bytes(64)

        @classmethod
        def from_ipc_handle(cls, device: torch.device, handle: bytes) -> "Event":
            runtime.opens_events -= 1
            full = None if runtime.opens_events >= 0 else Code.cudaErrorMapBufferObjectFailed
            _raise(runtime.refused.get("cudaIpcOpenEventHandle", full))
            return cls(interprocess=True)

    return Event


def install(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Put it in the place of CUDA."""
    runtime = Runtime()
    bindings = ModuleType("cuda.bindings")
    driver = Driver(runtime)
    vars(bindings).update(runtime=runtime, driver=driver)
    for name, module in {"cuda": ModuleType("cuda"), "cuda.bindings": bindings}.items():
        monkeypatch.setitem(sys.modules, name, module)
    for module in (runtime, driver):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def empty_cache() -> None:
        runtime.free, runtime.cached = runtime.free + runtime.cached, 0

    for name, value in {
        "device": lambda device: Device(runtime, device),
        "mem_get_info": lambda: (runtime.free, runtime.total),
        "empty_cache": empty_cache,
        "device_count": lambda: len(runtime.visible),
        "get_device_properties": lambda device: SimpleNamespace(uuid=runtime.visible[_index(device)]),
        "current_stream": lambda device: Stream(runtime),
        "current_device": lambda: runtime.current,
        "can_device_access_peer": lambda device, holder: runtime.peers,
        "Event": events_of(runtime),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "as_tensor", _as_tensor)
    return runtime


def _as_tensor(owner: Any, device: torch.device) -> torch.Tensor:
    """What torch makes of memory with a CUDA array interface: a tensor that keeps `owner`."""
    [nbytes], (address, _) = owner.__cuda_array_interface__["shape"], owner.__cuda_array_interface__["data"]
    return host_view(address, nbytes, owner)


def host_view(address: int, nbytes: int, owner: object = None) -> torch.Tensor:
    """Memory of the stand-in as a tensor, uint8 `[nbytes]`, which keeps `owner`."""
    memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    memory.owner = owner
    return torch.frombuffer(memory, dtype=torch.uint8)


def _index(device: torch.device | int) -> int:
    return device if isinstance(device, int) else device.index


def _raise(code: Code | None) -> None:
    if code is not None:
        raise RuntimeError(
            f"CUDA error: {code.name}\nCompile with TORCH_USE_CUDA_DSA to enable device-side assertions."
        )
