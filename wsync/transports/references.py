"""Tensors that a sender hands over where they lie: described once, and again only when anything about them has changed.

    ("segments", key, bytes, ...)              allocations that hold the tensors: what opens each, and its size
    ("memories", segment, offset, bytes, ...)  where in them each memory lies
    ("places", place, ...)                     the tensors of the bucket in these memories
    ("refer", number, bucket)                  the bucket is there: as described just now, or else the last time

A description is cut into frames of bounded size. How a process opens an allocation of another is a transport's affair.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

from wsync.errors import ProtocolError
from wsync.plan import Bucket
from wsync.traits import addresses
from wsync.views import Place, Views, extents

_FRAME_ITEMS = 3 * 1024
"""A segment's key has 128 characters, a place some 50 bytes: a frame stays below 256 KiB."""


@dataclass(frozen=True, slots=True)
class Segment:
    """An allocation of this process that others can open."""

    key: str
    """What opens it. No other allocation of this process ever has the same."""

    start: int
    """Address of its first byte, here."""

    nbytes: int


class Exporter(Protocol):
    """The side whose memory it is."""

    def segments(self, starts: Sequence[int]) -> Sequence[Segment]:
        """The segment of each address. Raises `TransportError` if memory there cannot be opened by others."""
        ...

    def intact(self, segments: Sequence[Segment]) -> bool:
        """Whether all of these are the allocations that they were: none was freed, and others put in its place."""
        ...


class Importer(Protocol):
    """The side that reads."""

    def open(self, key: str, nbytes: int) -> torch.Tensor:
        """A segment, uint8 `[nbytes]`: it is given back when the last view is dropped. Raises `TransportError`."""
        ...


@dataclass(frozen=True, slots=True)
class _Described:
    """What the receivers know of a bucket."""

    addresses: Sequence[int]
    places: tuple[Place, ...]
    segments: Sequence[Segment]


class Descriptions:
    """The sender's side. Holds no tensor."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._known: dict[int, _Described] = {}

    def frames(self, bucket: Bucket, views: Views) -> Sequence[tuple[object, ...]]:
        """What to send before "refer": nothing if the receivers know it. Raises as `Exporter.segments`."""
        found, known = addresses(views.memories), self._known.get(bucket.index)
        if (
            known is not None
            and known.addresses == found
            and (known.places is views.places or known.places == views.places)
            and self._exporter.intact(known.segments)
        ):
            return ()
        sizes = extents(views.places, len(views.memories))
        filled = [start for start, size in zip(found, sizes, strict=True) if size]
        of = dict(zip(filled, self._exporter.segments(filled), strict=True))
        segments = list(dict.fromkeys(of.values()))
        numbers = {segment: number for number, segment in enumerate(segments)}
        memories = [
            (numbers[of[start]], start - of[start].start, size) if size else (0, 0, 0)
            for start, size in zip(found, sizes, strict=True)
        ]
        self._known[bucket.index] = _Described(found, views.places, segments)
        return [
            *_cut("segments", list(chain.from_iterable((segment.key, segment.nbytes) for segment in segments))),
            *_cut("memories", list(chain.from_iterable(memories))),
            *_cut("places", views.places),
        ]


class Openings:
    """A receiver's side. Holds every segment that the last descriptions name, and no other."""

    def __init__(self, importer: Importer) -> None:
        self._importer = importer
        self._open: dict[str, torch.Tensor] = {}
        self._known: dict[int, tuple[Views, frozenset[str]]] = {}
        self._heard: dict[str, list[object]] = {}

    def hear(self, frame: tuple[object, ...]) -> bool:
        """Take a frame in, if it is part of a description."""
        kind, *items = frame
        if kind not in ("segments", "memories", "places"):
            return False
        self._heard.setdefault(str(kind), []).extend(items)
        return True

    def views(self, bucket: Bucket) -> Views:
        """The tensors of `bucket`, as described. Raises `ProtocolError` if they are not, `TransportError`."""
        if self._heard:
            heard, self._heard = self._heard, {}
            keys, memories = self._opened(heard.get("segments", ()), heard.get("memories", ()))
            self._known[bucket.index] = Views(memories, _checked(heard.get("places", ()), memories, bucket)), keys
            used = frozenset[str]().union(*(keys for _, keys in self._known.values()))
            self._open = {key: segment for key, segment in self._open.items() if key in used}
        if bucket.index not in self._known:
            raise ProtocolError(f"bucket {bucket.index} was handed over without a word on where it lies")
        return self._known[bucket.index][0]

    def close(self) -> None:
        """Drop all segments. Those of which somebody holds a view stay open until it is dropped."""
        self._open.clear()
        self._known.clear()

    def _opened(
        self, segments: Sequence[object], memories: Sequence[object]
    ) -> tuple[frozenset[str], Sequence[torch.Tensor]]:
        keys: list[str] = []
        for key, nbytes in _tuples(segments, 2):
            if not isinstance(key, str) or not isinstance(nbytes, int) or nbytes <= 0:
                raise ProtocolError("the sender described a segment that is none")
            if key not in self._open:
                self._open[key] = self._importer.open(key, nbytes)
            keys.append(key)
        device = self._open[keys[0]].device if keys else None
        found = []
        for number, offset, size in _tuples(memories, 3):
            if not (isinstance(number, int) and isinstance(offset, int) and isinstance(size, int)):
                raise ProtocolError("the sender described a memory that is none")
            if not size:
                found.append(torch.empty(0, dtype=torch.uint8, device=device))
                continue
            segment = self._open[keys[number]] if 0 <= number < len(keys) else None
            if segment is None or offset < 0 or size < 0 or offset + size > segment.numel():
                raise ProtocolError("the sender described a memory outside of its segments")
            found.append(segment[offset : offset + size])
        return frozenset(keys), found


def _cut(kind: str, items: Sequence[object]) -> Iterator[tuple[object, ...]]:
    for start in range(0, len(items), _FRAME_ITEMS):
        yield (kind, *items[start : start + _FRAME_ITEMS])


def _tuples(items: Sequence[object], width: int) -> Iterator[tuple[object, ...]]:
    if len(items) % width:
        raise ProtocolError("the sender's description ends in the middle")
    return zip(*(items[start::width] for start in range(width)), strict=True)


def _checked(items: Sequence[object], memories: Sequence[torch.Tensor], bucket: Bucket) -> tuple[Place, ...]:
    places = tuple(item for item in items if isinstance(item, Place))
    if len(places) != len(items) or len(places) != len(bucket.tensors):
        raise ProtocolError(f"the sender described {len(places)} tensors; bucket {bucket.index} has others")
    for place, meta in zip(places, bucket.tensors, strict=True):
        region = place.region
        if region.numel != meta.elements.numel or not 0 <= place.memory < len(memories):
            raise ProtocolError(f"the sender described {meta.name} as what it is not")
        if region.numel and (
            region.bounds[0] < 0 or region.bounds[1] * place.dtype.itemsize > memories[place.memory].numel()
        ):
            raise ProtocolError(f"the sender described {meta.name} outside of its memory")
    return places
