"""One rank's share of a bucket as ready-made strided copies and messages: worked out once, run at every sync."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from wsync.deadline import Deadline
from wsync.gather import BucketGather, Packet, Part, align, aligned
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
    """Bytes `start .. start + nbytes` of a buffer, to or from a rank."""

    rank: int
    start: int
    nbytes: int

    def of(self, buffer: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The rank and the bytes."""
        return self.rank, buffer[self.start : self.start + self.nbytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """All of one rank's work for one bucket: `stage`, then `fill`."""

    staged: tuple[Load, ...]
    """Into the outbox."""

    own: tuple[Load, ...]
    """Into the slot."""

    sends: tuple[Message, ...]
    """From the outbox."""

    receives: tuple[tuple[bool, Message], ...]
    """(into the slot, message), else into the inbox."""

    exchanged: bool
    """Whether any rank sends anything."""

    moves: tuple[Move, ...]
    """From the inbox into the slot."""

    outbox_nbytes: int
    inbox_nbytes: int

    def parents(self, slot: torch.Tensor | None) -> set[str]:
        """The parameters that `stage` reads."""
        return {load.parent for load in (*self.staged, *(self.own if slot is not None else ()))}

    def stage(self, tensors: Mapping[str, torch.Tensor], outbox: torch.Tensor, slot: torch.Tensor | None) -> None:
        """Cast and pack what others need into `outbox` (uint8, at least `outbox_nbytes`), and own parts into `slot`.

        `tensors`: local parameters by name; nothing else reads them.
        """
        _load(self.staged, tensors, outbox)
        if slot is not None:
            _load(self.own, tensors, slot)

    def fill(
        self,
        boxes: tuple[torch.Tensor, torch.Tensor],
        slot: torch.Tensor | None,
        group: Group,
        deadline: Deadline,
    ) -> None:
        """Exchange with the other ranks and put what they sent in its place in `slot`. `boxes`: outbox and inbox."""
        outbox, inbox = boxes
        if self.exchanged:
            # The first transfer connects all ranks: one that has nothing to say must be there too.
            sends = self.sends or (Message(rank=group.rank, start=0, nbytes=0),)
            group.transfer(
                [message.of(outbox) for message in sends],
                [message.of(inbox if slot is None or not in_slot else slot) for in_slot, message in self.receives],
                deadline,
            )
        if slot is not None:
            _move(self.moves, inbox, slot)


def compile_exchange(gather: BucketGather, pieces: Pieces, layouts: Mapping[str, Layout]) -> Exchange:
    """Turn parts into copies between the memory of this rank's parameters, its two boxes and the slot."""
    starts, outbox_nbytes = _lay_out(gather.packets)
    inbox = [(rank, packet) for rank, packet in gather.receives if not packet.in_place]
    places, inbox_nbytes = _lay_out([packet for _, packet in inbox])
    inbox_starts = iter(places)
    receives = []
    for rank, packet in gather.receives:
        start = _slot_start(packet.parts[0]) if packet.in_place else next(inbox_starts)
        receives.append((packet.in_place, Message(rank=rank, start=start, nbytes=packet.nbytes)))
    return Exchange(
        staged=tuple(
            load
            for packet, start in zip(gather.packets, starts, strict=True)
            for part, region in _places(packet, start)
            for load in _loads(part, region, pieces, layouts)
        ),
        own=tuple(load for part in gather.own for load in _loads(part, _in_slot(part), pieces, layouts)),
        sends=tuple(
            Message(rank=rank, start=starts[index], nbytes=gather.packets[index].nbytes) for rank, index in gather.sends
        ),
        receives=tuple(receives),
        exchanged=gather.exchanged,
        moves=tuple(
            _placed(part, region)
            for (_, packet), start in zip(inbox, places, strict=True)
            for part, region in _places(packet, start)
        ),
        outbox_nbytes=outbox_nbytes,
        inbox_nbytes=inbox_nbytes,
    )


def _lay_out(packets: Sequence[Packet]) -> tuple[list[int], int]:
    """First byte of each packet in a box that holds them one after the other, and the size of the box."""
    starts, end = [], 0
    for packet in packets:
        starts.append(end)
        end = align(end + packet.nbytes)
    return starts, end


def _slot_start(part: Part) -> int:
    return part.tensor.offset + part.slot.offset * part.tensor.dtype.itemsize


def _places(packet: Packet, start: int) -> Iterable[tuple[Part, Region]]:
    """Each part with its elements in a box that holds the packet at byte `start`."""
    for part, offset in zip(packet.parts, packet.offsets, strict=True):
        yield part, Region.span((start + offset) // part.tensor.dtype.itemsize, part.source.numel)


def _in_slot(part: Part) -> Region:
    return part.slot.translate(part.tensor.offset // part.tensor.dtype.itemsize)


def _placed(part: Part, source: Region) -> Move:
    target = _in_slot(part)
    return Move(dtype=part.tensor.dtype, source=Region.whole(target.sizes).translate(source.offset), target=target)


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
