"""Host memory and CUDA devices, measured."""

import ctypes
import gc
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.fake_nvml import FakeNvml, Gpu
from wsync.errors import ConfigError, UnsupportedError
from wsync.memory import cuda_device, host, host_device
from wsync.memory.cuda_device import CudaDevice
from wsync.memory.device import Device
from wsync.memory.host_device import HostDevice

MIB = 1 << 20
GIB = 1 << 30
LARGE = 256 * MIB
SLACK = 32 * MIB
"""What the rest of the process may take or give meanwhile."""

UUID = "3f2a91c0-0000-1111-2222-333333333333"


def test_host_memory_of_a_tensor_comes_and_goes() -> None:
    device: Device = HostDevice()
    before = device.usage()
    tensor = torch.ones(LARGE, dtype=torch.uint8)
    during = device.usage()
    assert tensor.nbytes == LARGE
    del tensor
    gc.collect()
    device.empty_cache()
    after = device.usage()
    assert abs(during.allocated - before.allocated - LARGE) < SLACK
    assert abs(after.allocated - before.allocated) < SLACK
    for usage in (before, during, after):
        assert usage.allocated == usage.reserved == usage.by_this_process == usage.host_rss
        assert usage.peak_allocated == usage.peak_reserved >= usage.allocated
        assert 0 < usage.free <= usage.total
        assert usage.by_others is None
    assert after.peak_allocated >= during.allocated - SLACK


def test_host_peaks_begin_anew() -> None:
    device = HostDevice()
    tensor = torch.ones(LARGE, dtype=torch.uint8)
    high = device.usage().peak_allocated
    assert tensor.nbytes == LARGE
    del tensor
    gc.collect()
    device.empty_cache()
    device.reset_peak()
    usage = device.usage()
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this kernel does not let a process reset its peak")
    assert usage.peak_allocated < high - LARGE + SLACK


def test_freed_host_memory_that_the_c_library_keeps_is_given_back() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("a C library other than glibc")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    device, block = HostDevice(), 64 << 10  # too small for glibc to map one by one
    blocks = [libc.malloc(block) for _ in range(LARGE // block)]
    for address in blocks:
        ctypes.memset(address, 1, block)
    for address in blocks[:-1]:  # the last one keeps the heap from shrinking by itself
        libc.free(address)
    kept = device.usage().allocated
    device.empty_cache()
    given = kept - device.usage().allocated
    libc.free(blocks[-1])
    assert given > LARGE - SLACK


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc of our own: 8 GiB, of which 3 are free; this process has 1,000 pages and had 100 MiB."""
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text(
        "MemTotal:  8388608 kB\nMemFree:  100000 kB\nMemAvailable:    3145728 kB\nHugePages_Total:       0\n"
    )
    (tmp_path / "self/statm").write_text("5000 1000 400 5 0 900 0\n")
    (tmp_path / "self/status").write_text("Name:\tpython\nVmHWM:\t  102400 kB\nThreads:\t1\n")
    monkeypatch.setattr(host, "PROC", tmp_path)
    monkeypatch.setattr(host_device, "pinned_bytes", lambda: 77)
    return tmp_path


def test_host_memory_is_read_from_proc(proc: Path) -> None:
    usage = HostDevice().usage()
    assert (usage.total, usage.free) == (8 * GIB, 3 * GIB)
    assert usage.allocated == 1000 * os.sysconf("SC_PAGE_SIZE")
    assert usage.peak_reserved == 100 * MIB
    assert usage.host_pinned == 77


def test_a_peak_is_never_below_what_is_there(proc: Path) -> None:
    (proc / "self/status").write_text("VmHWM:\t  8 kB\n")
    assert HostDevice().usage().peak_allocated == 1000 * os.sysconf("SC_PAGE_SIZE")
    (proc / "self/status").write_text("Name:\tpython\n")
    assert HostDevice().usage().peak_allocated == 1000 * os.sysconf("SC_PAGE_SIZE")


def test_resetting_a_peak_writes_5_where_that_is_allowed(proc: Path) -> None:
    HostDevice().reset_peak()
    assert not (proc / "self/clear_refs").exists()
    (proc / "self/clear_refs").write_text("")
    HostDevice().reset_peak()
    assert (proc / "self/clear_refs").read_text() == "5"
    assert HostDevice().usage().peak_reserved == 100 * MIB


def test_a_cuda_device_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="torch sees none"):
        CudaDevice(0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """torch.cuda with two devices, as far as `CudaDevice` looks. Returns what it is told to do."""
    told: list[tuple[str, Any]] = []
    stats = {
        "allocated_bytes.all.current": 3 * GIB,
        "reserved_bytes.all.current": 4 * GIB,
        "allocated_bytes.all.peak": 5 * GIB,
        "reserved_bytes.all.peak": 6 * GIB,
    }
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "get_device_properties": lambda index: SimpleNamespace(name=f"NVIDIA H{index}", uuid=UUID),
        "mem_get_info": lambda index: (100 * GIB + index, 141 * GIB),
        "memory_stats": lambda index: stats,
        "reset_peak_memory_stats": lambda index: told.append(("reset", index)),
        "empty_cache": lambda: told.append(("empty", None)),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(cuda_device, "pinned_bytes", lambda: 77)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return told


@pytest.mark.parametrize(
    ("device", "index"), [(0, 0), (torch.device("cuda", 0), 0), (None, 1), (torch.device("cuda"), 1)]
)
def test_a_cuda_device_is_asked_by_its_index(
    cuda: list[tuple[str, Any]], device: torch.device | int | None, index: int
) -> None:
    found: Device = CudaDevice(device)
    assert found.name == f"cuda:{index} (NVIDIA H{index}, GPU-3f2a91c0)"
    usage = found.usage()
    assert (usage.free, usage.total) == (100 * GIB + index, 141 * GIB)
    assert (usage.allocated, usage.reserved) == (3 * GIB, 4 * GIB)
    assert (usage.peak_allocated, usage.peak_reserved) == (5 * GIB, 6 * GIB)
    assert (usage.by_this_process, usage.by_others) == (None, None)
    assert usage.host_rss > 0
    assert usage.host_pinned == 77
    found.reset_peak()
    found.empty_cache()
    assert cuda == [("reset", index), ("empty", None)]


@pytest.mark.parametrize(
    ("snapshot", "word"),
    [
        ({"allocator_settings": {"expandable_segments": True}}, "on"),
        ({"allocator_settings": {"expandable_segments": False}}, "off"),
        ({"segments": []}, "unknown"),
    ],
)
def test_a_cuda_device_says_whether_segments_expand(
    cuda: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, snapshot: dict[str, Any], word: str
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda index: snapshot)
    assert CudaDevice(0).describe() == f"cuda:0 (NVIDIA H0, GPU-3f2a91c0), expandable segments {word}"


def test_a_cuda_device_asks_the_driver(cuda: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu("GPU-other", GIB), Gpu(f"MIG-{UUID}", 40 * GIB, [(os.getpid(), 7 * GIB)])]
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(gpus))
    device = CudaDevice(0)
    assert device.name == "cuda:0 (NVIDIA H0, MIG-3f2a91c0)"
    usage = device.usage()
    assert (usage.by_this_process, usage.by_others) == (7 * GIB, 33 * GIB)


@pytest.mark.parametrize(("device", "message"), [(2, "sees 2"), (-1, "no cuda:-1"), (torch.device("cpu"), "got 'cpu'")])
def test_a_device_that_is_not_there(cuda: list[tuple[str, Any]], device: torch.device | int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CudaDevice(device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_live_setting_of_expandable_segments() -> None:
    switch: Any = torch._C._accelerator_setAllocatorSettings
    device = CudaDevice()
    before = device.describe()
    other = "off" if before.endswith("on") else "on"
    switch(f"expandable_segments:{other == 'on'}")
    try:
        assert device.describe() == f"{device.name}, expandable segments {other}"
    finally:
        switch(f"expandable_segments:{other == 'off'}")
    assert device.describe() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    device = CudaDevice()
    device.empty_cache()
    device.reset_peak()
    before = device.usage()
    tensor = torch.ones(LARGE, dtype=torch.uint8, device="cuda")
    during = device.usage()
    assert during.allocated - before.allocated == tensor.nbytes
    assert before.free - during.free >= LARGE - 2 * MIB
    del tensor
    cached = device.usage()
    assert (cached.allocated, cached.reserved) == (before.allocated, during.reserved)
    assert cached.peak_allocated >= during.allocated
    device.empty_cache()
    device.reset_peak()
    after = device.usage()
    assert after.reserved == before.reserved
    assert after.peak_allocated == after.allocated
    if before.by_this_process is not None and during.by_this_process is not None:
        assert during.by_this_process - before.by_this_process >= LARGE
