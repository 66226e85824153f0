"""What is moved and where it lies in a bucket. Pure layout: no I/O, no tensor is touched except by `view`.

Byte layout of a bucket, the only format that travels on every transport:

    offset 0                 256                    512
    | tensor a, contiguous | pad | tensor b ...

Each tensor lies contiguous (row-major, native endianness, its wire dtype) at an offset that is a multiple of 256
bytes, so any dtype may follow any other. A tensor larger than a bucket is cut into plain byte chunks that fill
whole buckets. Empty tensors take part with zero bytes.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from wsync.errors import ConfigError, MismatchError, first_five
from wsync.regions import Region
from wsync.views import Place, Views

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

    word_bytes: int = 1
    """Bytes of a word of the tensor's digest, the same on both sides; see `wsync.digest`. 1 fits however it is cut."""

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

    @property
    def place(self) -> Place:
        """Where it lies in its bucket: `shape` if whole, else the chunk's elements, 1-D."""
        itemsize = self.dtype.itemsize
        region = Region.whole(self.shape if self.is_whole else (self.chunk_nbytes // itemsize,))
        return Place(memory=0, dtype=self.dtype, region=region.translate(self.offset // itemsize))

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """View into `buffer` (uint8, `[bucket bytes]`): `shape` if whole, else the chunk's elements, 1-D. No copy."""
        return self.place.view(buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Tensors that share one slot."""

    index: int
    """Place in the plan, from 0. Slots are taken in turn, over all syncs of a session."""

    tensors: tuple[TensorMeta, ...]
    """In ascending order of `offset`."""

    nbytes: int
    """Bytes from the start of the slot to the end of the last tensor."""

    pulled: bool = False
    """Whether it takes no slot, and workers read its tensors where trainer ranks have them. Only the last one may."""

    sender: int | None = None
    """The trainer rank that sends it, if ranks take turns; None: every rank that owns engines sends it to them."""

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        """Each tensor as a view into `buffer` (uint8, `[at least nbytes]`), by `TensorMeta.view`."""
        for meta in self.tensors:
            yield meta, meta.view(buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a sync moves and in which buckets. The same on every rank and worker of a session."""

    specs: tuple[TensorSpec, ...]
    """In the order in which they were given; buckets keep it, but for members of a group drawn to its first one."""

    buckets: tuple[Bucket, ...]

    bucket_bytes: int
    """The limit that the buckets were packed to, in bytes."""

    in_place: bool = False
    """Whether all of it is read where the trainer has it, so that no slot is needed."""

    nbytes: int = field(init=False, compare=False)
    """Payload: bytes of all tensors, without padding."""

    _by_name: dict[str, TensorSpec] = field(init=False, repr=False, compare=False)
    _places: dict[int, tuple[Place, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(spec.nbytes for spec in self.specs))
        object.__setattr__(self, "_by_name", {spec.name: spec for spec in self.specs})
        places = {bucket.index: tuple(meta.place for meta in bucket.tensors) for bucket in self.buckets}
        object.__setattr__(self, "_places", places)

    @classmethod
    def pack(cls, specs: Iterable[TensorSpec], bucket_bytes: int, pulled: Collection[str] = frozenset()) -> "Plan":
        """Lay `specs` out in buckets of at most `bucket_bytes`. Equal input gives an equal plan on every rank.

        Members of an atomic group lie next to each other, and in one bucket if one can hold them all. Those named in
        `pulled` make one more bucket, of any size.

        Raises `ConfigError` for a name that comes twice, or a bucket below 256 bytes.
        """
        specs = tuple(specs)
        twice = [name for name, count in Counter(spec.name for spec in specs).items() if count > 1]
        if twice:
            raise ConfigError(
                f"{len(twice)} tensor names come more than once: {first_five(twice)}; send each name once"
            )
        packer = _Packer(bucket_bytes)
        packed: dict[int, list[TensorMeta]] = {}
        for unit in _units([spec for spec in specs if spec.name not in pulled]):
            packer.make_room([spec.nbytes for spec in unit])
            for spec in unit:
                for index, meta in packer.place(spec.name, spec.shape, spec.dtype):
                    packed.setdefault(index, []).append(meta)
        buckets = tuple(
            Bucket(index=index, tensors=tuple(metas), nbytes=metas[-1].offset + metas[-1].chunk_nbytes)
            for index, metas in packed.items()
        )
        there = [spec for spec in specs if spec.name in pulled]
        if there:
            [bucket] = cls.pack(there, sum(_align(spec.nbytes) for spec in there) + ALIGNMENT_BYTES).buckets
            buckets = (*buckets, replace(bucket, index=len(buckets), pulled=True))
        return cls(specs=specs, buckets=buckets, bucket_bytes=bucket_bytes)

    @property
    def pulled(self) -> Bucket | None:
        """The bucket that does not travel, if there is one."""
        return self.buckets[-1] if self.buckets and self.buckets[-1].pulled else None

    @property
    def sent(self) -> "Plan":
        """The plan of those buckets that travel."""
        return self if self.pulled is None else replace(self, buckets=self.buckets[:-1])

    def in_turns(self, ranks: Sequence[int]) -> "Plan":
        """The same buckets, sent by these ranks one after the other."""
        return replace(self, buckets=tuple(replace(b, sender=ranks[b.index % len(ranks)]) for b in self.buckets))

    @property
    def turns(self) -> Sequence[int]:
        """Ranks that take turns, in order; none if every rank that owns engines sends all to them."""
        return list(dict.fromkeys(bucket.sender for bucket in self.buckets if bucket.sender is not None))

    def sent_by(self, rank: int) -> "Plan":
        """The plan of those buckets that `rank` sends in its turns."""
        return replace(self, buckets=tuple(bucket for bucket in self.buckets if bucket.sender == rank))

    @property
    def capacity(self) -> int:
        """Bytes that a slot must have to take any bucket: a multiple of 256, at most `bucket_bytes`; 0 in place."""
        if self.in_place:
            return 0
        return max([ALIGNMENT_BYTES, *(_align(bucket.nbytes) for bucket in self.buckets if not bucket.pulled)])

    def spec(self, name: str) -> TensorSpec:
        """The tensor called `name`. Raises `MismatchError` if there is none."""
        try:
            return self._by_name[name]
        except KeyError:
            raise MismatchError(f"no tensor is called {name!r}; the plan has {len(self.specs)} tensors") from None

    def views(self, bucket: Bucket, slot: torch.Tensor) -> Views:
        """The tensors of `bucket`, which is one of this plan's, in `slot` (uint8, `[at least bucket.nbytes]`)."""
        return Views((slot,), self._places[bucket.index])

    def without_owners(self) -> "Plan":
        """The same layout for engine workers, whom it need not concern which trainer rank holds what."""
        return replace(self, specs=tuple(replace(spec, owners=()) for spec in self.specs))


def split_weight_chunks(
    weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    """Cut weights into pieces laid out in buckets of at most `bucket_bytes`, one tensor at a time.

    Yields `(meta, data)`, `data` uint8 `[meta.chunk_nbytes]`: the bytes of the weight itself, or of a contiguous
    copy if it is not contiguous. The next bucket begins where `meta.offset` is less than the end of the piece before.
    Raises `ConfigError` for a bucket below 256 bytes.
    """
    packer = _Packer(bucket_bytes)
    for name, tensor in weights:
        data = as_bytes(tensor)
        for _, meta in packer.place(name, tuple(tensor.shape), tensor.dtype):
            yield meta, data[meta.chunk_offset : meta.chunk_offset + meta.chunk_nbytes]


def merge_weight_chunks(
    chunks: Iterable[tuple[TensorMeta, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Put together what `split_weight_chunks` or the buckets of a plan gave, in the same order.

    Yields `(name, tensor)`. A tensor that came whole is a view of its chunk, another a copy on the same device.
    Raises `MismatchError` for a gap, an overlap, a tensor that comes twice, pieces that disagree about shape or
    dtype, and data of another size than its meta says.
    """
    done: set[str] = set()
    pending: TensorMeta | None = None
    target = torch.empty(0, dtype=torch.uint8)
    filled = 0
    for meta, data in chunks:
        if pending is None:
            if meta.name in done:
                raise MismatchError(f"tensor {meta.name} comes a second time")
            pending, filled = meta, 0
        _check_next(pending, filled, meta, data)
        if meta.is_whole:
            target = as_bytes(data)
        else:
            if not filled:
                target = torch.empty(math.prod(meta.shape) * meta.dtype.itemsize, dtype=torch.uint8, device=data.device)
            target[filled : filled + meta.chunk_nbytes] = as_bytes(data)
        filled += meta.chunk_nbytes
        if filled == target.numel():
            done.add(meta.name)
            pending = None
            yield meta.name, _typed(target, meta)
    if pending is not None:
        raise MismatchError(f"the last tensor, {pending.name}, ends after {filled} of {target.numel()} bytes")


def _check_next(first: TensorMeta, filled: int, meta: TensorMeta, data: torch.Tensor) -> None:
    """Raise unless `data` is the piece that follows `filled` bytes of the tensor that `first` began."""
    total = math.prod(first.shape) * first.dtype.itemsize
    place = f"bytes {meta.chunk_offset} to {meta.chunk_offset + meta.chunk_nbytes} of tensor {meta.name}"
    if meta.name != first.name:
        raise MismatchError(f"tensor {meta.name} begins while {first.name} has {filled} of {total} bytes: a gap")
    if (meta.shape, meta.dtype) != (first.shape, first.dtype):
        raise MismatchError(
            f"{place} says shape {meta.shape} and {meta.dtype}; its first piece said {first.shape} and {first.dtype}"
        )
    if meta.chunk_offset != filled:
        kind = "a gap" if meta.chunk_offset > filled else "an overlap or a repeated piece"
        raise MismatchError(f"{place} came when byte {filled} was next: {kind}")
    if meta.chunk_offset + meta.chunk_nbytes > total or (total and meta.chunk_nbytes <= 0):
        raise MismatchError(f"{place} is not a piece of its {total} bytes")
    if data.numel() * data.itemsize != meta.chunk_nbytes:
        raise MismatchError(f"{place} came with {data.numel() * data.itemsize} bytes of data")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `tensor`, row-major, as uint8 `[nbytes]`: a view if it is contiguous, else a copy."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # `view(-1)` would keep an odd stride of a tensor of one or no elements, which no dtype view takes.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def from_bytes(data: bytearray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor on the host over `data`, its elements row by row."""
    if not data:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(tuple(shape))


def _typed(data: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Bytes as the tensor that they are; copied first if they lie where the dtype cannot."""
    if data.storage_offset() % meta.dtype.itemsize:
        data = data.clone()
    return data.view(meta.dtype).view(meta.shape)


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _units(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """Specs in order, each alone or with all of its group at the place of the group's first member."""
    units: dict[tuple[bool, str], list[TensorSpec]] = {}
    for spec in specs:
        key = (False, spec.name) if spec.atomic_group is None else (True, spec.atomic_group)
        units.setdefault(key, []).append(spec)
    return list(units.values())


class _Packer:
    """Places tensors one after the other and goes on to the next bucket as they fill."""

    def __init__(self, bucket_bytes: int) -> None:
        if bucket_bytes < ALIGNMENT_BYTES:
            raise ConfigError(f"bucket_bytes is {bucket_bytes}; a bucket needs at least {ALIGNMENT_BYTES} bytes")
        self._limit = bucket_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._index = 0
        self._used = 0

    def make_room(self, sizes: Sequence[int]) -> None:
        """Leave the open bucket if tensors of these sizes do not fit in it together, but do in an empty one."""
        if self._end(self._used, sizes) > self._limit >= self._end(0, sizes):
            self._next()

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[int, TensorMeta]]:
        """`(bucket index, meta)` for the tensor, or for each of its chunks if no bucket can hold it."""
        nbytes = math.prod(shape) * dtype.itemsize
        self.make_room([min(nbytes, self._limit)])
        for start in range(0, max(nbytes, 1), self._limit):
            if start:
                self._next()
            here, offset = min(nbytes - start, self._limit), _align(self._used)
            self._used = offset + here
            yield (
                self._index,
                TensorMeta(name=name, shape=shape, dtype=dtype, offset=offset, chunk_offset=start, chunk_nbytes=here),
            )

    def _next(self) -> None:
        self._index += 1
        self._used = 0

    @staticmethod
    def _end(used: int, sizes: Sequence[int]) -> int:
        for nbytes in sizes:
            used = _align(used) + nbytes
        return used
