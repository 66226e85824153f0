"""CUDA devices by what is theirs alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from wsync.errors import TransportError


def uuid_of(device: torch.device | int) -> str:
    """Of a CUDA device of this process: the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: str) -> torch.device:
    """The device of this process that has `uuid`: indexes differ where `CUDA_VISIBLE_DEVICES` does.

    Args:
        uuid: also as it is in `Endpoint.device`, "cuda:<UUID>".

    Raises `TransportError` if it is not visible here.
    """
    uuid = uuid.removeprefix("cuda:")
    seen = [uuid_of(index) for index in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise TransportError(
            f"device {uuid} is not visible to this process; it sees {seen}. Start it with that device in "
            f"CUDA_VISIBLE_DEVICES, at any place"
        )
    return torch.device("cuda", seen.index(uuid))


@contextmanager
def current_device(name: str) -> Iterator[None]:
    """Context in which the device of an `Endpoint` is torch's current one; for "cpu" nothing changes.

    Raises `TransportError` if it is not visible here.
    """
    if name == "cpu":
        yield
    else:
        with torch.cuda.device(device_of(name)):
            yield


def can_read(reader: str, holder: str) -> bool:
    """Whether kernels on one device can read memory of another; both as in `Endpoint.device`, seen by this process.

    Raises `TransportError` if one is not visible here.
    """
    return reader == holder or torch.cuda.can_device_access_peer(device_of(reader), device_of(holder))
