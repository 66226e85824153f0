"""Replays a load plan: from what arrives, bucket by bucket, straight into the live parameters."""

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Protocol

import torch

from wsync.copies import Copies
from wsync.errors import MismatchError, ProtocolError, first_five
from wsync.loadplan import Copy, Fill, LoadPlan
from wsync.plan import Bucket, Plan, TensorMeta
from wsync.regions import Region
from wsync.strided import cut, lacking_bytes, memory_view
from wsync.targets import key_of, memories_of
from wsync.traits import addresses
from wsync.views import Pair, Place, Views


class Readable(Protocol):
    """A bucket that did not travel."""

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> int:
        """Read all of it into live `targets`, and say how many bytes these were. Queued on a device, else done then."""
        ...


Arrival = tuple[Bucket, Sequence[torch.Tensor] | Readable]
Arrivals = Iterable[Arrival]
LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], None]


@dataclass(frozen=True, slots=True)
class Step:
    """One copy of one bucket. `src` counts from the first element that the bucket holds of the source."""

    tensor: int
    """Index in `Bucket.tensors`."""

    src: Region
    target: str
    dst: Region


@dataclass(frozen=True, slots=True)
class _Direct:
    """The copies of one bucket for tensors that lie at certain places."""

    places: tuple[Place, ...]
    targets: tuple[str, ...]
    """The memories that the copies write, in the order in which they count them."""

    copies: Copies
    others: tuple[Step, ...]
    """What takes more than a copy."""


@dataclass(frozen=True, slots=True)
class Routine:
    """A load plan laid out for the buckets of one `Plan`: no decision is left for the time of the sync."""

    load: LoadPlan
    steps: tuple[tuple[Step, ...], ...]
    """By bucket index."""

    fills: tuple[Fill, ...]

    _direct: dict[int, _Direct] = field(default_factory=dict, compare=False, repr=False)
    _fitting: list[object] = field(default_factory=list, compare=False, repr=False)
    """Key of the targets that were found to fit last."""

    @classmethod
    def compile(cls, load: LoadPlan, plan: Plan) -> "Routine":
        """Lay out `load` for `plan`. Raises `MismatchError` if it was not recorded for the plan's specs."""
        if load.problems or not load.matches({spec.name: spec for spec in plan.specs}):
            raise MismatchError("the load plan was not recorded for the tensors of this plan; describe them first")
        by_source: dict[str, list[Copy]] = defaultdict(list)
        for copy in load.copies:
            by_source[copy.source].append(copy)
        steps = tuple(
            tuple(
                step
                for index, meta in enumerate(bucket.tensors)
                for copy in by_source[meta.name]
                for step in _steps(index, meta, copy)
            )
            for bucket in plan.buckets
        )
        return cls(load, steps, tuple(load.fills))

    def check(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Raise `MismatchError` if a target is gone, has another shape, or its memory was freed. It may have moved."""
        key = key_of(targets)
        if key is not None and key in self._fitting:
            return
        _check_present({name: targets[name] for name in self.load.layouts if name in targets})
        self.load.check_layouts(targets)
        self._fitting[:] = [] if key is None else [key]

    def direct(self, bucket: Bucket, places: tuple[Place, ...], targets: Mapping[str, torch.Tensor]) -> _Direct:
        """The copies of `bucket` for tensors at `places`; worked out anew only if those have changed."""
        known = self._direct.get(bucket.index)
        if known is None or known.places != places:
            known = self._direct[bucket.index] = _lay_out(bucket, self.steps[bucket.index], places, targets)
        return known


def _lay_out(
    bucket: Bucket, steps: Sequence[Step], places: tuple[Place, ...], targets: Mapping[str, torch.Tensor]
) -> _Direct:
    numbers = {name: number for number, name in enumerate(dict.fromkeys(step.target for step in steps))}
    pairs: list[Pair] = []
    others = []
    for step in steps:
        place, meta = places[step.tensor], bucket.tensors[step.tensor]
        if place.region.numel != meta.elements.numel:
            raise ProtocolError(f"{meta.name} arrived with {place.region.numel} elements of {meta.elements.numel}")
        wire_dtype = meta.dtype
        target_dtype = targets[step.target].dtype
        in_a_row = place.region.run_length == place.region.numel
        if not in_a_row or (place.dtype != wire_dtype and target_dtype != wire_dtype):
            others.append(step)
            continue
        source = Place(memory=place.memory, dtype=place.dtype, region=step.src.translate(place.region.offset))
        pairs.append((source, Place(memory=numbers[step.target], dtype=target_dtype, region=step.dst)))
    return _Direct(places, tuple(numbers), Copies(pairs), tuple(others))


def _steps(index: int, meta: TensorMeta, copy: Copy) -> Iterator[Step]:
    if meta.is_whole:
        yield Step(index, copy.src, copy.target, copy.dst)
        return
    low, high = meta.elements.bounds
    for src, dst in cut(copy.src, copy.dst, low, high):
        yield Step(index, src.translate(-low), copy.target, dst)


def _check_present(targets: Mapping[str, torch.Tensor]) -> None:
    """Raise `MismatchError` if there is no memory to write to."""
    if 0 not in addresses(list(targets.values())):
        return
    freed = [name for name, tensor in targets.items() if not tensor.data_ptr() and lacking_bytes(tensor)]
    if freed:
        raise MismatchError(
            f"the memory of {len(freed)} parameter(s) of the engine was freed: {first_five(freed)}; bring it back "
            f"before a sync"
        )


class Replay:
    """One sync of a `Routine` into live targets. Holds views of the model: drop it when the sync ends.

    Attributes:
        pulled_nbytes: bytes of buckets that did not travel.
    """

    def __init__(self, routine: Routine, targets: Mapping[str, torch.Tensor]) -> None:
        """Look up every destination. Raises as `Routine.check`."""
        routine.check(targets)
        self._routine, self._targets = routine, targets
        self._fills = [(fill, memory_view(targets[fill.target], fill.dst)) for fill in routine.fills]
        self._parts: dict[str, _Part] = {}
        self._failure: BaseException | None = None
        self.pulled_nbytes = 0

    def run(self, arrivals: Arrivals, load_weights: LoadWeights, before_write: Callable[[], None]) -> None:
        """Write everything that arrives. When this returns it is queued on the current streams of the devices.

        `before_write` is called once, before the first byte may be written. Tensors that need the engine's loader are
        handed to one call of `load_weights` as they arrive, and copies go on between them. That call is made when the
        first bucket is there: the loader may write before it takes a tensor. Raises what the arrivals raise, else what
        the loader raises, and `ProtocolError` if the loader stopped early.
        """
        arriving, first = iter(arrivals), list[Arrival]()
        stream = self._copied(_joined(first, arriving))
        try:
            first.extend(islice(arriving, 1))
            if not first:
                self._check_count(0)
            before_write()
            if self._routine.load.needs_loader:
                load_weights(stream)
            leftover = [name for name, _ in stream]
        except Exception as error:
            failure, self._failure = self._failure, None
            try:
                if failure is not None and failure is not error:
                    raise failure from error
                raise
            finally:
                del failure  # its traceback leads to this frame: views of slot and model would live on
        finally:
            first.clear()
            stream.close()
        if leftover or self._parts:
            names = first_five([*leftover, *self._parts])
            raise ProtocolError(f"the engine's loader stopped before it had taken every tensor; it left {names}")

    def _copied(self, arrivals: Arrivals) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Replay each bucket, and yield those of its tensors that the engine's loader must take."""
        count = 0
        try:
            for bucket, tensors in arrivals:
                if not count:
                    self._fill(last=False)
                count += 1
                if isinstance(tensors, Sequence):  # to ask for a protocol takes 50 us, before the copy begins
                    self._copy(bucket, tensors)
                    yield from self._offer(bucket, tensors)
                else:
                    self.pulled_nbytes += tensors.read_into(self._targets)
                del tensors
            self._check_count(count)
        except Exception as error:
            self._failure = error
            raise
        self._fill(last=True)

    def _check_count(self, count: int) -> None:
        if count != len(self._routine.steps):
            raise ProtocolError(f"{count} buckets arrived; the plan has {len(self._routine.steps)}")

    def _fill(self, *, last: bool) -> None:
        for fill, view in self._fills:
            if fill.last is last:
                view.fill_(fill.value)

    def _copy(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        views = Views.of(tensors)
        direct = self._routine.direct(bucket, views.places, self._targets)
        keys = views.key, key_of(self._targets)
        direct.copies.run(views.memories, memories_of(self._targets, direct.targets), keys)
        for number, steps in groupby(direct.others, lambda step: step.tensor):  # one tensor's casts at a time
            flats: dict[torch.dtype, torch.Tensor] = {}
            for step in steps:
                target = self._targets[step.target]
                if target.dtype not in flats:
                    flats[target.dtype] = _flat(views[number], bucket.tensors[number], target.dtype)
                memory_view(target, step.dst).copy_(memory_view(flats[target.dtype], step.src))

    def _offer(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors for the loader, each when all of it has arrived; copies, which it may edit and keep."""
        for index, meta in enumerate(bucket.tensors):
            if meta.name not in self._routine.load.through_loader:
                continue
            tensor = tensors[index]
            if meta.is_whole:
                yield meta.name, tensor.to(meta.dtype, copy=True, memory_format=torch.contiguous_format)
                continue
            part = self._parts.setdefault(meta.name, _Part(meta, tensor.device))
            if part.take(meta, tensor):
                del self._parts[meta.name]
                yield meta.name, part.flat.view(meta.shape)


def _joined(first: list[Arrival], rest: Arrivals) -> Iterator[Arrival]:
    """`first`, of which nothing is kept, and then `rest`."""
    while first:
        yield first.pop(0)
    yield from rest


class _Part:
    """A tensor that arrives in chunks and is needed whole."""

    def __init__(self, meta: TensorMeta, device: torch.device) -> None:
        self.flat = torch.empty(math.prod(meta.shape), dtype=meta.dtype, device=device)
        self._missing = self.flat.nbytes

    def take(self, meta: TensorMeta, chunk: torch.Tensor) -> bool:
        """Put one chunk in its place, cast to the wire dtype. True if that was the last one."""
        meta.elements.view(self.flat).copy_(chunk.reshape(-1))
        self._missing -= meta.chunk_nbytes
        return self._missing == 0


def _flat(tensor: torch.Tensor, meta: TensorMeta, target: torch.dtype) -> torch.Tensor:
    """`tensor` with its elements in a row; rounded to the wire dtype first if neither end has that."""
    if tensor.dtype != meta.dtype and target != meta.dtype:
        tensor = tensor.to(meta.dtype)
    return tensor.contiguous()
