"""One rank's share of a bucket as ready-made strided copies and messages: worked out once, run at every sync."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from wsync.copies import Copies
from wsync.deadline import Deadline
from wsync.gather import BucketGather, Packet, Part, align, aligned
from wsync.group import Group
from wsync.regions import Region
from wsync.targets import memories_of
from wsync.traits import dtypes
from wsync.views import Pair, Place


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


class Loads:
    """Copies from the memory of parameters into a buffer, each with the cast to its wire dtype in it.

    Attributes:
        parents: the parameters, in the order in which the pairs count them.
    """

    def __init__(self, parents: Sequence[str], pairs: Sequence[Pair]) -> None:
        self.parents, self._pairs = tuple(parents), tuple(pairs)
        self._dtypes: Sequence[torch.dtype] | None = None
        self._copies = Copies(())

    def run(self, tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
        """`tensors`: local parameters by name. `buffer`: uint8."""
        memories = memories_of(tensors, self.parents)
        found = dtypes(memories)
        if found != self._dtypes:  # what a producer reads may be more precise than what the module holds
            pairs = [(replace(source, dtype=found[source.memory]), target) for source, target in self._pairs]
            self._dtypes, self._copies = found, Copies(pairs)
        self._copies.run(memories, [buffer])


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

    staged: Loads
    """Into the outbox."""

    own: Loads
    """Into the slot."""

    sends: tuple[tuple[bool, Message], ...]
    """(from the slot, message), else from the outbox."""

    receives: tuple[tuple[bool, Message], ...]
    """(into the slot, message), else into the inbox."""

    exchanged: bool
    """Whether any rank sends anything."""

    moves: Copies
    """From the inbox into the slot."""

    outbox_nbytes: int
    inbox_nbytes: int

    def parents(self, slot: torch.Tensor | None) -> set[str]:
        """The parameters that `stage` reads."""
        return {*self.staged.parents, *(self.own.parents if slot is not None else ())}

    def stage(self, tensors: Mapping[str, torch.Tensor], outbox: torch.Tensor, slot: torch.Tensor | None) -> None:
        """Cast and pack what others need into `outbox` (uint8, at least `outbox_nbytes`), and own parts into `slot`.

        `tensors`: local parameters by name; nothing else reads them.
        """
        self.staged.run(tensors, outbox)
        if slot is not None:
            self.own.run(tensors, slot)

    def fill(
        self,
        boxes: tuple[torch.Tensor, torch.Tensor],
        slot: torch.Tensor | None,
        group: Group,
        deadline: Deadline,
        *,
        first: bool,
    ) -> None:
        """Exchange with the other ranks and put what they sent in its place in `slot`.

        Args:
            boxes: outbox and inbox.
            slot: uint8, on the device of the boxes; None on a rank that is no sender.
            group: of all ranks.
            deadline: for what has to be waited for.
            first: wait for the exchange on a device. What runs there for the first time waits for all that is queued,
                and does not hear of a rank that died.
        """
        outbox, inbox = boxes
        if self.exchanged:
            # The first transfer connects all ranks: one that has nothing to say must be there too.
            sends = self.sends or ((False, Message(rank=group.rank, start=0, nbytes=0)),)
            group.transfer(
                [message.of(outbox if slot is None or not in_slot else slot) for in_slot, message in sends],
                [message.of(inbox if slot is None or not in_slot else slot) for in_slot, message in self.receives],
                deadline,
            )
            if first:
                group.settle(deadline)
        if slot is not None:
            self.moves.run([inbox], [slot])


def compile_exchange(gather: BucketGather, pieces: Pieces, layouts: Mapping[str, Layout]) -> Exchange:
    """Turn parts into copies between the memory of this rank's parameters, its two boxes and the slot."""
    own = {id(part) for part in gather.own}
    sent = _place(gather.packets, [packet.in_place and id(packet.parts[0]) in own for packet in gather.packets])
    received = _place([packet for _, packet in gather.receives], [packet.in_place for _, packet in gather.receives])
    return Exchange(
        staged=_loads([pair for placed in sent.boxed for pair in _places(*placed)], pieces, layouts),
        own=_loads([(part, _in_slot(part)) for part in gather.own], pieces, layouts),
        sends=tuple(sent.message(rank, index) for rank, index in gather.sends),
        receives=tuple(received.message(rank, index) for index, (rank, _) in enumerate(gather.receives)),
        exchanged=gather.exchanged,
        moves=Copies([_placed(*pair) for placed in received.boxed for pair in _places(*placed)]),
        outbox_nbytes=sent.box_nbytes,
        inbox_nbytes=received.box_nbytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """Packets, each in the slot or in a box that holds those one after the other."""

    packets: Sequence[Packet]
    in_slot: Sequence[bool]
    starts: Sequence[int]
    box_nbytes: int

    @property
    def boxed(self) -> Iterable[tuple[Packet, int]]:
        """Those in the box, each with its first byte."""
        for packet, inside, start in zip(self.packets, self.in_slot, self.starts, strict=True):
            if not inside:
                yield packet, start

    def message(self, rank: int, index: int) -> tuple[bool, Message]:
        """Of a packet, to or from `rank`: (in the slot, message)."""
        message = Message(rank=rank, start=self.starts[index], nbytes=self.packets[index].nbytes)
        return self.in_slot[index], message


def _place(packets: Sequence[Packet], in_slot: Sequence[bool]) -> _Placed:
    starts, end = [], 0
    for packet, inside in zip(packets, in_slot, strict=True):
        starts.append(_slot_start(packet.parts[0]) if inside else end)
        end = end if inside else align(end + packet.nbytes)
    return _Placed(packets=packets, in_slot=in_slot, starts=starts, box_nbytes=end)


def _slot_start(part: Part) -> int:
    return part.tensor.offset + part.slot.offset * part.tensor.dtype.itemsize


def _places(packet: Packet, start: int) -> Iterable[tuple[Part, Region]]:
    """Each part with its elements in a box that holds the packet at byte `start`."""
    for part, offset in zip(packet.parts, packet.offsets, strict=True):
        yield part, Region.span((start + offset) // part.tensor.dtype.itemsize, part.source.numel)


def _in_slot(part: Part) -> Region:
    return part.slot.translate(part.tensor.offset // part.tensor.dtype.itemsize)


def _placed(part: Part, source: Region) -> Pair:
    target = _in_slot(part)
    region = Region.whole(target.sizes).translate(source.offset)
    dtype = part.tensor.dtype
    return Place(memory=0, dtype=dtype, region=region), Place(memory=0, dtype=dtype, region=target)


def _loads(parts: Sequence[tuple[Part, Region]], pieces: Pieces, layouts: Mapping[str, Layout]) -> Loads:
    """Copies of `parts`, each with its elements in the buffer."""
    numbers: dict[str, int] = {}
    pairs: list[Pair] = []
    for part, target in parts:
        piece = pieces[part.tensor.name, part.owner]
        layout = layouts[piece.parent]
        number = numbers.setdefault(piece.parent, len(numbers))
        found = [region for ordinals in piece.local.select(part.source) for region in layout.memory.select(ordinals)]
        pairs += [
            (
                Place(memory=number, dtype=layout.dtype, region=source),
                Place(memory=0, dtype=part.tensor.dtype, region=place),
            )
            for source, place in aligned(found, (target,))
        ]
    return Loads(tuple(numbers), pairs)
