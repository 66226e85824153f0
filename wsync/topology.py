"""Where trainer ranks and engine workers sit, and which transport serves them."""

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from wsync.device import uuid_of
from wsync.errors import UnsupportedError

if TYPE_CHECKING:
    from wsync.protocols import Transport

CPU = torch.device("cpu")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One process that sends or receives."""

    host: str
    """Boot id of the kernel it runs on: equal only on the same machine."""

    network: int
    """Inode of its network namespace, 0 where the kernel has none. Containers of one host have their own."""

    process: str
    """Random and the process's own: containers may share a host and yet have equal pids."""

    pid: int
    """For people, and for signals where it is known to be of the same namespace."""

    device: str
    """"cpu", or "cuda:<UUID>" of the device that holds its weights. Never an index."""

    def __str__(self) -> str:
        return f"pid {self.pid} with {self.device} on host {self.host[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One sender and the workers that it serves."""

    sender: Endpoint
    receivers: tuple[Endpoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The transport that serves a topology, and why none of the others does."""

    topology: Topology
    transport: "Transport"
    rejected: Mapping[str, str]
    """Name of every other transport -> why it was not taken."""

    def explain(self) -> str:
        """One line for people."""
        others = "; ".join(f"not {name}: {reason}" for name, reason in self.rejected.items())
        return f"{self.transport.name} to {len(self.topology.receivers)} worker(s)" + (f" ({others})" if others else "")


def local_endpoint(device: torch.device | str) -> Endpoint:
    """This process, with its weights on `device`.

    Raises `UnsupportedError` where the kernel gives no boot id, or for a device that is neither CPU nor CUDA.
    """
    network = 0
    try:
        host = _BOOT_ID.read_text().strip()
    except OSError as error:
        raise UnsupportedError(f"cannot tell this machine from others: {_BOOT_ID} is not readable ({error})") from error
    with suppress(OSError):
        network = _NETWORK.stat().st_ino
    return Endpoint(
        host=host,
        network=network,
        process=_process(),
        pid=os.getpid(),
        device=_device_name(torch.device(device)),
    )


@cache
def _process() -> str:
    os.register_at_fork(after_in_child=_process.cache_clear)
    return secrets.token_hex(16)


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise UnsupportedError(f"weights on a {device.type!r} device cannot be placed; cpu and cuda can")
    return f"cuda:{uuid_of(device)}"


def choose(topology: Topology, transports: Sequence["Transport"], wanted: object) -> Choice:
    """The first of `transports`, best first, that serves `topology`.

    Args:
        wanted: "auto", the name of one of `transports`, or an object that meets `wsync.Transport`.

    Raises:
        UnsupportedError: none serves, or `wanted` does not; the message has the reason of each.
    """
    candidates = [cast("Transport", wanted)] if not isinstance(wanted, str) else list(transports)
    if isinstance(wanted, str) and wanted not in ("auto", *(transport.name for transport in transports)):
        names = ", ".join(transport.name for transport in transports)
        raise UnsupportedError(f"there is no transport {wanted!r}; choose auto or one of: {names}")
    chosen: Transport | None = None
    rejected: dict[str, str] = {}
    for transport in candidates:
        if isinstance(wanted, str) and wanted not in ("auto", transport.name):
            rejected[transport.name] = f"{wanted} was asked for"
        elif (reason := transport.refuse(topology)) is not None:
            rejected[transport.name] = reason
        elif chosen is not None:
            rejected[transport.name] = f"ranked after {chosen.name}"
        else:
            chosen = transport
    if chosen is None:
        raise UnsupportedError(
            f"no transport serves {topology.sender} and worker(s) "
            f"{', '.join(map(str, topology.receivers[:5]))}{', ...' if len(topology.receivers) > 5 else ''}: "
            + "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
        )
    return Choice(topology=topology, transport=chosen, rejected=rejected)
