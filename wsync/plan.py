"""What is moved and where it lies in a bucket. Pure layout: no I/O, no tensor is touched except by `view`.

Byte layout of a bucket, the only format that travels on every transport:

    offset 0                 256                    512
    | tensor a, contiguous | pad | tensor b ...

Each tensor lies contiguous (row-major, native endianness, its wire dtype) at an offset that is a multiple of 256
bytes, so any dtype may follow any other. A tensor larger than a bucket is cut into plain byte chunks that fill
whole buckets. Empty tensors take part with zero bytes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from wsync.regions import Region

ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """One trainer rank's part of a full tensor."""

    rank: int
    """Trainer rank that holds the part."""

    region: Region
    """The part, as positions in the flattened full tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor that the engine is to receive."""

    name: str
    """Engine-side name: the one that the Hugging Face checkpoint uses."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""

    dtype: torch.dtype
    """Wire dtype. In a producer's metadata: the dtype that the trainer holds."""

    owners: tuple[Owner, ...] = ()
    """Who holds which part. Parts may repeat (replicas); together they cover the tensor."""

    atomic_group: str | None = None
    """Tensors with the same group name are loaded together or not at all (tied weights, LoRA A and B)."""

    optional: bool = False
    """A non-persistent buffer: sent if the engine takes it, left out otherwise."""

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor in `dtype`."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """A tensor, or a byte chunk of one, at an offset in a bucket."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full tensor, also for a chunk."""

    dtype: torch.dtype
    offset: int
    """Byte offset in the bucket, a multiple of 256."""

    chunk_offset: int = 0
    """First byte of the flattened tensor that this chunk holds; 0 for a whole tensor."""

    chunk_nbytes: int
    """Bytes here; the whole tensor's bytes unless it was cut."""

    @property
    def is_whole(self) -> bool:
        """True if the bucket holds the full tensor."""
        return self.chunk_nbytes == math.prod(self.shape) * self.dtype.itemsize

    @property
    def elements(self) -> Region:
        """The chunk as positions in the flattened tensor."""
        itemsize = self.dtype.itemsize
        return Region.span(self.chunk_offset // itemsize, self.chunk_nbytes // itemsize)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """View into `buffer` (uint8, `[bucket bytes]`): `shape` if whole, else the chunk's elements, 1-D. No copy."""
        flat = buffer[self.offset : self.offset + self.chunk_nbytes].view(self.dtype)
        return flat.view(self.shape) if self.is_whole else flat
