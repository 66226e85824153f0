"""What trainer ranks let others read, as plain data."""

import ctypes
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wsync.regions import Region
from wsync.topology import Endpoint, local_endpoint
from wsync.traits import addresses
from wsync.views import Place, extents

_PROBE_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Elements of one tensor of a bucket, where one rank has them."""

    tensor: int
    """Index in `Bucket.tensors`."""

    elements: Region
    """Positions in the flattened full tensor."""

    place: Place
    """Of the same sizes: element i of the one is element i of the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What one rank has of a bucket."""

    memories: Sequence[torch.Tensor]
    """What the places of `parts` count."""

    parts: tuple[Share, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The same for other processes."""

    rank: int
    endpoint: Endpoint
    addresses: tuple[int, ...]
    """Of the first byte of each memory."""

    sizes: tuple[int, ...]
    """Bytes of each memory, up to the last one that is needed."""

    parts: tuple[Share, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A few bytes of a trainer rank: whoever reads them right can read the rest."""

    rank: int
    endpoint: Endpoint
    address: int
    value: bytes


class Probed:
    """Random bytes in memory of this process, for as long as this object lives."""

    def __init__(self, rank: int, device: torch.device) -> None:
        value = secrets.token_bytes(_PROBE_BYTES)
        self._memory = ctypes.create_string_buffer(value, _PROBE_BYTES)
        self.probe = Probe(
            rank=rank, endpoint=local_endpoint(device), address=ctypes.addressof(self._memory), value=value
        )


def export(rank: int, device: torch.device, shares: Shares) -> Export:
    """What other processes need to read `shares`."""
    return Export(
        rank=rank,
        endpoint=local_endpoint(device),
        addresses=tuple(addresses(shares.memories)),
        sizes=tuple(extents([part.place for part in shares.parts], len(shares.memories))),
        parts=shares.parts,
    )
