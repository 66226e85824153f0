"""One rank's share of a bucket as ready-made strided copies and messages: worked out once, run at every sync."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from wsync.deadline import Deadline
from wsync.gather import BucketGather, Packet, Part, aligned
from wsync.group import Group
from wsync.regions import Region
from wsync.strided import memory_view


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How this rank holds one parameter or buffer. It must not change while a session lives."""

    shape: tuple[int, ...]
    """Shape of the full tensor."""

    dtype: torch.dtype

    region: Region
    """Positions of the local elements in the flattened full tensor; empty on a rank that has none."""

    memory: Region
    """Where the local elements lie, counted from the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A region of an engine-side tensor that lies in a parameter of this rank."""

    parent: str
    """The parameter."""

    local: Region
    """Ordinals of the local elements, in the order of the region."""


Pieces = Mapping[tuple[str, Region], Piece]
"""By tensor name and the coalesced region that this rank declared as its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A copy from parameter memory into a buffer, with the cast to `dtype` in it."""

    parent: str
    source: Region
    dtype: torch.dtype
    target: Region
    """Of the sizes of `source`, in elements of `dtype` from the start of the buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A copy from one buffer into another; both regions in elements of `dtype` from the start."""

    dtype: torch.dtype
    source: Region
    target: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Bytes `start .. start + nbytes` of the outbox or inbox, to or from a rank."""

    rank: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect:
    """An all-gather of `nbytes` of every rank, from the outbox at `start` into the slot at `offset`."""

    start: int
    nbytes: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """All of one rank's work for one bucket: `stage`, then `fill`."""

    staged: tuple[Load, ...]
    """Into the outbox."""

    own: tuple[Load, ...]
    """Into the slot."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    collects: tuple[Collect, ...]
    moves: tuple[Move, ...]
    """From the inbox into the slot."""

    outbox_nbytes: int
    inbox_nbytes: int

    def stage(self, tensors: Mapping[str, torch.Tensor], outbox: torch.Tensor) -> None:
        """Cast and pack into `outbox` (uint8, at least `outbox_nbytes`). `tensors`: local parameters by name."""
        _load(self.staged, tensors, outbox)

    def fill(
        self,
        tensors: Mapping[str, torch.Tensor],
        boxes: tuple[torch.Tensor, torch.Tensor],
        slot: torch.Tensor | None,
        group: Group,
        deadline: Deadline,
    ) -> None:
        """Exchange with the other ranks and put everything in its place in `slot`. `boxes`: outbox and inbox."""
        outbox, inbox = boxes
        if slot is not None:
            _load(self.own, tensors, slot)
        group.transfer(
            [(message.rank, outbox[message.start : message.start + message.nbytes]) for message in self.sends],
            [(message.rank, inbox[message.start : message.start + message.nbytes]) for message in self.receives],
            deadline,
        )
        if slot is not None:
            _move(self.moves, inbox, slot)
            group.all_gather(
                [slot[one.offset : one.offset + one.nbytes * group.world_size] for one in self.collects],
                [outbox[one.start : one.start + one.nbytes] for one in self.collects],
                deadline,
            )


def compile_exchange(gather: BucketGather, pieces: Pieces, layouts: Mapping[str, Layout]) -> Exchange:
    """Turn parts into copies between the memory of this rank's parameters, its two boxes and the slot."""

    def loads(part: Part, target: Region) -> Iterable[Load]:
        return _loads(part, target, pieces, layouts)

    staged: list[Load] = []
    starts, collects = [], []
    outbox_nbytes = 0
    for packet in gather.packets:
        starts.append(outbox_nbytes)
        for part, region in _places(packet, outbox_nbytes):
            staged += loads(part, region)
        outbox_nbytes += packet.nbytes
    for part in gather.gathered:
        packet = Packet.of([part])
        staged += [load for one, region in _places(packet, outbox_nbytes) for load in loads(one, region)]
        collects.append(Collect(start=outbox_nbytes, nbytes=part.nbytes, offset=part.tensor.offset))
        outbox_nbytes += packet.nbytes
    receives, moves = [], []
    inbox_nbytes = 0
    for rank, packet in gather.receives:
        receives.append(Message(rank=rank, start=inbox_nbytes, nbytes=packet.nbytes))
        moves += [_placed(part, region) for part, region in _places(packet, inbox_nbytes)]
        inbox_nbytes += packet.nbytes
    return Exchange(
        staged=tuple(staged),
        own=tuple(load for part in gather.own for load in loads(part, _in_slot(part))),
        sends=tuple(
            Message(rank=rank, start=starts[index], nbytes=gather.packets[index].nbytes) for rank, index in gather.sends
        ),
        receives=tuple(receives),
        collects=tuple(collects),
        moves=tuple(moves),
        outbox_nbytes=outbox_nbytes,
        inbox_nbytes=inbox_nbytes,
    )


def _places(packet: Packet, start: int) -> Iterable[tuple[Part, Region]]:
    """Each part with its elements in a box that holds the packet at byte `start`."""
    for part, offset in zip(packet.parts, packet.offsets, strict=True):
        yield part, Region.span((start + offset) // part.tensor.dtype.itemsize, part.source.numel)


def _in_slot(part: Part) -> Region:
    return part.slot.translate(part.tensor.offset // part.tensor.dtype.itemsize)


def _placed(part: Part, source: Region) -> Move:
    [(here, there)] = aligned((source,), (_in_slot(part),))
    return Move(dtype=part.tensor.dtype, source=here, target=there)


def _loads(part: Part, target: Region, pieces: Pieces, layouts: Mapping[str, Layout]) -> Iterable[Load]:
    piece = pieces[part.tensor.name, part.owner]
    memory = layouts[piece.parent].memory
    found = [region for ordinals in piece.local.select(part.source) for region in memory.select(ordinals)]
    for source, place in aligned(found, (target,)):
        yield Load(parent=piece.parent, source=source, dtype=part.tensor.dtype, target=place)


def _load(loads: Sequence[Load], tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
    if loads:
        typed = _typed(buffer, {load.dtype for load in loads})
        torch._foreach_copy_(
            [memory_view(typed[load.dtype], load.target) for load in loads],
            [memory_view(tensors[load.parent], load.source) for load in loads],
        )


def _move(moves: Sequence[Move], source: torch.Tensor, target: torch.Tensor) -> None:
    if moves:
        dtypes = {move.dtype for move in moves}
        here, there = _typed(source, dtypes), _typed(target, dtypes)
        torch._foreach_copy_(
            [memory_view(there[move.dtype], move.target) for move in moves],
            [memory_view(here[move.dtype], move.source) for move in moves],
        )


def _typed(buffer: torch.Tensor, dtypes: Iterable[torch.dtype]) -> dict[torch.dtype, torch.Tensor]:
    """The buffer (uint8) seen as each dtype, without the bytes at its end that make no element."""
    return {dtype: buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype) for dtype in dtypes}
