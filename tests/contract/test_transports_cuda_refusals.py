"""What CUDA itself refuses, and devices that are seen at another index, on GPUs."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from wsync.errors import TransportError
from wsync.transports.cuda_ipc import CudaIpcTransport
from wsync.transports.device_memory import allocate, open_exported

DEVICE = torch.device("cuda", 0)
SLOT_BYTES = 4096
TIMEOUT_S = 120.0
GPUS = torch.cuda.device_count()

FILL = """
import sys, torch
from wsync.device import device_of
from wsync.transports.device_memory import open_exported
device = device_of(sys.argv[1])
slot = open_exported(device, bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
slot.fill_(7)
torch.cuda.synchronize(device)
print(device)
"""

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def goes_on() -> Iterator[None]:
    """Whatever was refused, torch computes afterwards, and nothing is kept."""
    torch.ones(1, device=DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    yield
    assert float(torch.ones(1000, device=DEVICE).sum()) == 1000
    torch.cuda.synchronize(DEVICE)
    assert torch.cuda.memory_allocated(DEVICE) == before
    torch.cuda.empty_cache()


def fill_elsewhere(visible: str) -> "tuple[subprocess.CompletedProcess[str], torch.Tensor]":
    """A slot of the first device here, filled by a process that sees the devices `visible`."""
    handle, slot = allocate(DEVICE, SLOT_BYTES, 1)
    slot.zero_()
    torch.cuda.synchronize(DEVICE)
    uuid = str(torch.cuda.get_device_properties(DEVICE).uuid)
    done = subprocess.run(
        [sys.executable, "-c", FILL, uuid, handle.hex(), str(SLOT_BYTES)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done, slot.cpu()


def named(*indexes: int) -> str:
    """For `CUDA_VISIBLE_DEVICES`: by UUID, whatever this process was given."""
    return ",".join(f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in indexes)


def test_too_little_memory() -> None:
    _, total = torch.cuda.mem_get_info(DEVICE)
    with pytest.raises(TransportError, match=r"bytes were free \(cudaErrorMemoryAllocation\): lower bucket_bytes"):
        CudaIpcTransport().sender(slot_bytes=total, num_slots=2, receivers=1, generation=1, device=DEVICE)


def test_memory_that_torch_keeps_is_asked_for() -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(DEVICE)
    kept = torch.empty(free // 10 * 8, dtype=torch.uint8, device=DEVICE)
    del kept
    _, memory = allocate(DEVICE, free // 2, 1)
    assert memory.nbytes >= free // 2
    del memory
    gc.collect()
    assert torch.cuda.mem_get_info(DEVICE)[0] >= free // 10 * 9


def test_a_handle_of_no_memory() -> None:
    with pytest.raises(TransportError, match=r"cannot be mapped on cuda:0: cudaError.* share an IPC namespace"):
        open_exported(DEVICE, bytes(64), SLOT_BYTES)


def test_the_same_device_in_another_process() -> None:
    done, slot = fill_elsewhere(named(0))
    assert done.stdout == "cuda:0\n", done.stderr
    assert slot.eq(7).all()


def test_a_process_that_sees_no_device() -> None:
    done, slot = fill_elsewhere("")
    assert "TransportError: device " in done.stderr
    assert "is not visible to this process; it sees []" in done.stderr
    assert slot.eq(0).all()


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
def test_the_same_device_at_another_index() -> None:
    done, slot = fill_elsewhere(named(1, 0))
    assert done.stdout == "cuda:1\n", done.stderr
    assert slot.eq(7).all()


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
def test_a_process_that_sees_another_device_only() -> None:
    done, slot = fill_elsewhere(named(1))
    assert "is not visible to this process; it sees ['" in done.stderr
    assert slot.eq(0).all()
