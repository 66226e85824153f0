"""Reading half of a model over NVLink beside copies on the device: on how many multiprocessors, and by which engine?

    python -m benchmarks.link_reads        # two GPUs that read each other

Both GPUs do the same at the same time, as two workers of an engine do that pulls a dense 7B from two ranks: most of
what one needs lies on its device in fp32, the rest on the other one, cast to bf16 already. Before that it tells what a
process takes of a device whose memory it has mapped over CUDA IPC.
"""

import multiprocessing as mp
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wsync import copy_kernel
from wsync.copies import Copies
from wsync.regions import Region
from wsync.transports.device_memory import allocate, open_exported
from wsync.views import Pair, Place

LAYERS = 28
NEAR_NUMEL, FAR_NUMEL = 115_000_000, 20_200_000
"""Of each layer."""

SHARES = (1, 2, 3, 4, 6, 8)
ROUNDS = 12
MIB = 1 << 20


class Reader:
    """One GPU's copies, near in fp32 and far in bf16, both into bf16."""

    def __init__(self, here: int, there: int) -> None:
        self.device = torch.device("cuda", here)
        self.near = [_random(NEAR_NUMEL, torch.float32, self.device) for _ in range(LAYERS)]
        self.far = [_random(FAR_NUMEL, torch.bfloat16, torch.device("cuda", there)) for _ in range(LAYERS)]
        self.near_into = [torch.empty_like(one, dtype=torch.bfloat16) for one in self.near]
        self.far_into = [torch.empty_like(one, device=self.device) for one in self.far]
        self.far_into[0].copy_(self.far[0])  # opens the way between the devices
        make: Any = torch.cuda.Stream
        self.main, self.side = make(self.device), make(self.device)
        self._near = Copies(_pairs(self.near, torch.bfloat16), device=self.device)
        self._far: Copies | None = None

    def share(self, share: int) -> None:
        """Over the link with one program for each `share` multiprocessors."""
        copy_kernel._LINK_SHARE = share
        self._far = Copies(_pairs(self.far, torch.bfloat16), device=self.device, over_link=True)

    def run_near(self) -> None:
        with torch.cuda.stream(self.main):
            self._near.run(self.near, self.near_into)

    def run_far(self) -> None:
        assert self._far is not None
        with torch.cuda.stream(self.side):
            self._far.run(self.far, self.far_into)

    def run_engine(self) -> None:
        """By the device's copy engines."""
        from cuda.bindings import runtime

        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        with torch.cuda.device(self.device):
            for source, target in zip(self.far, self.far_into, strict=True):
                stream = self.side.cuda_stream
                runtime.cudaMemcpyAsync(target.data_ptr(), source.data_ptr(), source.nbytes, kind, stream)

    def right(self) -> bool:
        """Whether everything arrived; what did is wiped."""
        near = all(torch.equal(a.to(torch.bfloat16), b) for a, b in zip(self.near, self.near_into, strict=True))
        far = all(torch.equal(a.to(self.device), b) for a, b in zip(self.far, self.far_into, strict=True))
        for one in (*self.near_into, *self.far_into):
            one.zero_()
        return near and far


def _random(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=device).uniform_(-1, 1)


def _pairs(tensors: Sequence[torch.Tensor], target: torch.dtype) -> list[Pair]:
    whole = [Region.span(0, tensor.numel()) for tensor in tensors]
    return [
        (Place(memory=n, dtype=tensor.dtype, region=region), Place(memory=n, dtype=target, region=region))
        for n, (tensor, region) in enumerate(zip(tensors, whole, strict=True))
    ]


def seconds(readers: Sequence[Reader], *ways: Callable[[Reader], None]) -> float:
    """Median of all ways on both GPUs at once, until all is done."""
    samples = []
    for round_ in range(ROUNDS + 2):
        for reader in readers:
            torch.cuda.synchronize(reader.device)
        began = time.perf_counter()
        for way in ways:
            for reader in readers:
                way(reader)
        for reader in readers:
            torch.cuda.synchronize(reader.device)
        if round_ >= 2:
            samples.append(time.perf_counter() - began)
    return statistics.median(samples)


def compare() -> bool:
    """A line for each way over the link. Whether all bytes arrived each time."""
    readers = [Reader(0, 1), Reader(1, 0)]
    near_bytes, far_bytes = (sum(one.nbytes for one in some) for some in (readers[0].near, readers[0].far))
    near = seconds(readers, Reader.run_near)
    print(f"near: {near_bytes / 1e9:.1f} GB in fp32 on each device, alone {near * 1e3:.2f} ms")
    print(
        f"far: {far_bytes / 1e9:.2f} GB in bf16 each way\n{'over the link':<20}{'alone':>8}{'both':>8}{'floor':>8}  ms"
    )
    right = True
    for share in SHARES:
        for reader in readers:
            reader.share(share)
        right &= _line(f"kernel, 1/{share} of SMs", readers, near, Reader.run_far)
    return _line("copy engine", readers, near, Reader.run_engine) and right


def _line(name: str, readers: Sequence[Reader], near: float, far: Callable[[Reader], None]) -> bool:
    alone, both = seconds(readers, far), seconds(readers, far, Reader.run_near)
    right = all(reader.right() for reader in readers)
    print(f"{name:<20}{alone * 1e3:>8.2f}{both * 1e3:>8.2f}{max(alone, near) * 1e3:>8.2f}  {'' if right else 'WRONG'}")
    return right


def mapped() -> None:
    """What a process on the second GPU takes of the first one, step by step."""
    handle, memory = allocate(torch.device("cuda", 0), 64 * MIB, 1)
    memory.random_(0, 255)
    ours, theirs = mp.Pipe()
    other = mp.get_context("spawn").Process(target=_map, args=(theirs, handle, memory.numel()), daemon=True)
    other.start()
    before = torch.cuda.mem_get_info(0)[0]
    try:
        while (step := ours.recv()) != "end":
            print(f"{step:<48}{(before - torch.cuda.mem_get_info(0)[0]) / MIB:8.0f} MiB of the other device")
            ours.send(None)
    finally:
        other.kill()
        other.join()


def _map(pipe: Any, handle: bytes, nbytes: int) -> None:
    from cuda.bindings import runtime

    def step(name: str) -> None:
        torch.cuda.synchronize(1)
        pipe.send(name)
        pipe.recv()

    torch.cuda.set_device(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda:1")
    step("its own device in use")
    torch.cuda.can_device_access_peer(1, 0)
    step("asked whether it can read")
    exported = runtime.cudaIpcMemHandle_t()
    exported.reserved = handle
    code, address = runtime.cudaIpcOpenMemHandle(exported, runtime.cudaIpcMemLazyEnablePeerAccess)
    step(f"handle opened on its own device (code {int(code)})")
    kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
    runtime.cudaMemcpyAsync(target.data_ptr(), address, nbytes, kind, torch.cuda.current_stream(1).cuda_stream)
    step("read by a copy engine")
    runtime.cudaIpcCloseMemHandle(address)
    shown = open_exported(torch.device("cuda", 1), handle, nbytes, holder=torch.device("cuda", 0))
    step("opened as wsync does, a tensor of the other device")
    Copies(_pairs([target], torch.uint8), device=torch.device("cuda", 1)).run([shown], [target])
    step("read by a kernel")
    pipe.send("end")


if __name__ == "__main__":
    if torch.cuda.device_count() < 2:
        sys.exit("benchmarks.link_reads needs two GPUs that read each other")
    mapped()
    sys.exit(0 if compare() else 1)
