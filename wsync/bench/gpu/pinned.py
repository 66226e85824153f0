"""How fast this machine copies between pinned host memory and the device: the most that offload can reach."""

import statistics
from functools import partial

import torch

from wsync.bench.gpu.outcome import seconds_on_device
from wsync.memory.sizes import GIB

_ROUNDS = 5


class PinnedCopies:
    """Samples of single large copies, both ways, in bytes a second."""

    def __init__(self) -> None:
        self.to_host: list[float] = []
        self.to_device: list[float] = []

    def sample(self) -> None:
        """Some of each, after one that does not count. Takes a GiB on both sides."""
        host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
        for samples, copy in (
            (self.to_host, partial(host.copy_, device, non_blocking=True)),
            (self.to_device, partial(device.copy_, host, non_blocking=True)),
        ):
            copy()
            samples += [GIB / seconds_on_device(copy) for _ in range(_ROUNDS)]

    def medians(self) -> tuple[float, float]:
        """To the host, to the device."""
        return statistics.median(self.to_host), statistics.median(self.to_device)
