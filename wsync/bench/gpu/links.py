"""Links between devices: what crosses them by plain copies, and what crossed them, as the devices count it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_RECEIVED = 139
"""NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: KiB of data, without headers."""

_ALL_LINKS = 0xFFFFFFFF


def received_bytes() -> list[int] | None:
    """By device, since it started; None where the driver does not tell."""
    import pynvml

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        counts = []
        for index in range(nvml.nvmlDeviceGetCount()):
            [value] = nvml.nvmlDeviceGetFieldValues(nvml.nvmlDeviceGetHandleByIndex(index), [(_RECEIVED, _ALL_LINKS)])
            if value.nvmlReturn != nvml.NVML_SUCCESS:
                return None
            counts.append(int(value.value.ullVal) << 10)
    except nvml.NVMLError:
        return None
    return counts


def bring(numels: Sequence[int]) -> Callable[[], None]:
    """Brings so many bf16 elements to each device from the next one, all at the same time."""
    devices = [torch.device("cuda", index) for index in range(len(numels))]
    ways = list(_ways(numels, devices))

    def run() -> None:
        for source, target, streams in ways:  # of its own: torch orders copies by the streams of both ends
            with torch.cuda.stream(streams[0]), torch.cuda.stream(streams[1]):
                target.copy_(source, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)

    return run


def _ways(
    numels: Sequence[int], devices: Sequence[torch.device]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[torch.cuda.Stream]]]:
    for numel, device, other in zip(numels, devices, [*devices[1:], devices[0]], strict=True):
        source = torch.empty(numel, dtype=torch.bfloat16, device=other).uniform_(-1, 1)
        streams = [torch.cuda.Stream(one) for one in (other, device)]  # type: ignore[no-untyped-call]
        yield source, torch.empty_like(source, device=device), streams
