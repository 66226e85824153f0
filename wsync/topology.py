"""Where trainer ranks and engine workers sit, and which transport serves them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One process that sends or receives."""

    host: str
    """Boot id of the kernel it runs on: equal only on the same machine."""

    pid: int
    device: str
    """"cpu", or "cuda:<UUID>" of the device that holds its weights. Never an index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One sender and the workers that it serves."""

    sender: Endpoint
    receivers: tuple[Endpoint, ...]
