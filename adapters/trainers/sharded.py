"""The part of a producer that does not care how a module was sharded: ranks hold regions, buckets are put together."""

import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from wsync.adapters.trainers.exchange import Exchange, Layout, Piece, compile_exchange
from wsync.adapters.trainers.exportable import check_exportable, check_present, plain
from wsync.adapters.trainers.exposed import parts_of
from wsync.adapters.trainers.names import Held, Source, held_tensors, left_out, sources
from wsync.deadline import Deadline
from wsync.digest import digest_part
from wsync.errors import ClosedError, MismatchError, ProtocolError, UnsupportedError, first_five
from wsync.gather import GatherPlan, aligned, holders_of
from wsync.group import Group
from wsync.plan import Bucket, Owner, Plan, TensorSpec
from wsync.pull.exports import Share, Shares
from wsync.regions import Region
from wsync.strided import memory_view
from wsync.targets import key_of, memories_of
from wsync.views import Place, Views

_Spot = tuple[str, Region]
"""A parameter or buffer, and a region of its memory."""


class ShardedProducer:
    """A `wsync.Producer` over a module of which this rank holds regions. Subclasses say which.

    Between syncs it holds the module weakly and no parameter at all.

    Args:
        module: what is trained.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._kind = type(module).__name__
        self._layouts: dict[str, Layout] = {}
        self._known: dict[Hashable, Layout] = {}
        self._parents: dict[str, str] = {}
        self._left_out: dict[str, str | None] = {}
        self._pieces: dict[tuple[str, Region], Piece] = {}
        self._tensors: Mapping[str, torch.Tensor] | None = None
        self._plan: Plan | None = None
        self._group: Group | None = None
        self._exchanges: tuple[Exchange, ...] = ()
        self._references: tuple[tuple[Sequence[str], tuple[Place, ...]] | None, ...] = ()
        self._shared: tuple[Sequence[str], tuple[Share, ...]] = ((), ())
        self._boxes: tuple[torch.Tensor, torch.Tensor] | None = None
        self._beside: torch.Tensor | None = None
        self._filled: set[int] = set()
        self._staged: int | None = None
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """See `wsync.Producer`."""
        return self._device

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers that this rank keeps from one sync to the next."""
        return sum(memory.numel() for memory in (*(self._boxes or ()), self._beside) if memory is not None)

    def metadata(self) -> Sequence[TensorSpec]:
        """See `wsync.Producer`."""
        held, tensors = self._look_up()
        found = self._sources(self._alive(), held)
        self._parents = {source.name: source.parent for source in found}
        parents = set(self._parents.values())
        self._left_out = left_out(held, parents)
        self._device = next((tensor.device for tensor, _ in tensors.values()), self._device)
        self._layouts = {name: layout for name, (_, layout) in tensors.items() if name in parents}
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._pieces = {}
        specs = []
        for source in found:
            layout = self._layouts[source.parent]
            regions = self._add_pieces(source, layout)
            specs.append(
                TensorSpec(
                    name=source.name,
                    shape=source.shape,
                    dtype=layout.dtype,
                    owners=tuple(Owner(rank=rank, region=region) for region in regions),
                    optional=source.optional,
                )
            )
        return specs

    def prepare(self, plan: Plan, senders: Sequence[int], group: Group) -> None:
        """See `wsync.Producer`."""
        self._plan, self._group = plan, group
        self._exchanges = self._compile(plan, senders, group)
        self._references = tuple(self._placed(self._find(bucket, plan, group)) for bucket in plan.buckets)
        if plan.pulled is not None:
            self._shared = parts_of(plan.pulled, self._pieces, self._layouts)
        self._boxes = self._beside = None
        self._filled.clear()

    def open(self) -> None:
        """See `wsync.Producer`. Raises `ClosedError` if the module is gone."""
        self._tensors = self._look_quickly() or self._look_closely()
        self._staged = None

    def _look_closely(self) -> dict[str, torch.Tensor]:
        """Raises `MismatchError` if they are not what they were at connect."""
        held, tensors = self._look_up()
        changed = [
            f"{name} (was {layout}, is {tensors[name][1] if name in tensors else 'gone'})"
            for name, layout in self._layouts.items()
            if name not in tensors or (tensors[name][1] is not layout and tensors[name][1] != layout)
        ]
        for name, twin in left_out(held, set(self._parents.values())).items():
            if name not in self._left_out:
                changed.append(f"{name} (is new)")
            elif self._left_out[name] not in (None, twin):
                changed.append(f"{name} (was tied to {self._left_out[name]}, is not)")
        if changed:
            raise MismatchError(
                f"{len(changed)} tensors of {self._kind} are no longer what they were at connect: "
                f"{first_five(changed)}; connect again"
            )
        return {name: tensors[name][0] for name in self._layouts}

    def confirm(self) -> bool:
        """See `wsync.Producer`."""
        return True

    def references(self, bucket: Bucket) -> Sequence[torch.Tensor] | None:
        """See `wsync.Producer`."""
        found, tensors = self._references[bucket.index], self._opened()
        if found is None:
            return None
        parents, places = found
        return Views(memories_of(tensors, parents), places, key=key_of(tensors))

    def exposes(self, name: str) -> bool:
        """See `wsync.protocols.pull.ExportingProducer`."""
        return True

    def shares(self, bucket: Bucket) -> Shares:
        """See `wsync.protocols.pull.ExportingProducer`."""
        parents, parts = self._shared
        return Shares(memories=memories_of(self._opened(), parents), parts=parts)

    @torch.no_grad()
    def stage(self, bucket: Bucket, slot: torch.Tensor | None) -> None:
        """See `wsync.Producer`."""
        exchange = self._exchanges[bucket.index]
        exchange.stage(self._readable(exchange.parents(slot)), self._buffers()[0], self._near(exchange, slot))
        self._staged = bucket.index

    @torch.no_grad()
    def fill(self, bucket: Bucket, slot: torch.Tensor | None) -> None:
        """See `wsync.Producer`. Raises `ProtocolError` if another bucket was staged last, and as `Group.transfer`."""
        if self._staged != bucket.index:
            raise ProtocolError(f"bucket {bucket.index} is to be filled, but bucket {self._staged} was staged last")
        self._staged = None
        _, group = self._prepared()
        exchange, deadline = self._exchanges[bucket.index], Deadline.after(group.timeout_s)
        near, first = self._near(exchange, slot), bucket.index not in self._filled
        self._filled.add(bucket.index)
        try:
            exchange.fill(self._buffers(), near, group, deadline, first=first)
            if slot is not None and near is not None and near is not slot:
                group.settle(deadline)  # hears of deaths, which the copy does not
                slot[: bucket.nbytes].copy_(near[: bucket.nbytes])
        except BaseException:
            self._boxes = self._beside = None  # a transfer that was given up may still write there
            raise

    @torch.no_grad()
    def digests(self, names: Sequence[str]) -> Sequence[int]:
        """See `wsync.Producer`."""
        return [self._digest(name) for name in names]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `wsync.Producer`. A tensor that lies whole in this process is the trainer's own memory: do not write."""
        self._opened()
        if not self.confirm():
            self.open()
        return self._named_tensors()

    @torch.no_grad()
    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        plan, group = self._prepared()
        everyone = range(group.world_size)
        for spec in plan.specs:
            dtype = self._layouts[self._parents[spec.name]].dtype
            single = Plan.pack([replace(spec, dtype=dtype)], max(4096, 256 + spec.numel * dtype.itemsize))
            [bucket] = single.buckets
            places = self._find(bucket, single, group)
            if places is not None:
                [(parent, region)] = places
                yield spec.name, memory_view(self._opened()[parent], region)
                continue
            [exchange] = self._compile(single, everyone, group)
            boxes = self._allocate(exchange.outbox_nbytes), self._allocate(exchange.inbox_nbytes)
            slot = self._allocate(bucket.nbytes)
            exchange.stage(self._readable(exchange.parents(slot)), boxes[0], slot)
            deadline = Deadline.after(group.timeout_s)
            exchange.fill(boxes, slot, group, deadline, first=True)
            yield spec.name, bucket.tensors[0].view(slot)

    def close(self) -> None:
        """See `wsync.Producer`."""
        self._tensors = None
        self._staged = None

    def _look_quickly(self) -> Mapping[str, torch.Tensor] | None:
        """The parameters, if they are what the last close look found; None: look closely."""
        return None

    def _settle(self, module: nn.Module) -> None:
        """Bring `module` into the state in which its parameters are the sharded ones. Local."""

    def _held(self, module: nn.Module) -> Mapping[str, Held]:
        """Every parameter and buffer by its name without wrappers. Raises `UnsupportedError`."""
        return held_tensors(module)

    def _sources(self, module: nn.Module, held: Mapping[str, Held]) -> list[Source]:
        """What the engine is to receive of what is `held`. The same on every rank."""
        return sources(module, held)

    def _readable(self, parents: Collection[str]) -> Mapping[str, torch.Tensor]:
        """Local memory of `parents`, and perhaps of others, with the bytes that the engine is to receive."""
        return self._opened()

    def _local(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Hashable]:
        """The elements of `tensor` in this process, and what tells where they belong if their shape does not."""
        return tensor, None

    def _region(self, name: str, tensor: torch.Tensor, local: torch.Tensor) -> Region:
        """Positions of `local` in the flattened full `tensor`. Raises `UnsupportedError`."""
        return Region.whole(tensor.shape)

    def _alive(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ClosedError(f"the {self._kind} that this session exports has been garbage collected")
        return module

    def _look_up(self) -> tuple[Mapping[str, Held], dict[str, tuple[torch.Tensor, Layout]]]:
        """What is held, and its local memory and layout, as they are now."""
        module = self._alive()
        self._settle(module)
        all_held, found = self._held(module), {}
        with torch.no_grad():
            for name, held in all_held.items():
                check_exportable(name, held.tensor)
                local, placing = self._local(held.tensor) if held.start is None else (held.tensor, held.start)
                check_present(name, local)
                local = plain(local)
                key = (held.shape, held.tensor.dtype, local.shape, local.stride(), placing)
                layout = self._known.get(key)
                if layout is None:
                    layout = self._known[key] = Layout(
                        shape=held.shape,
                        dtype=held.tensor.dtype,
                        region=(
                            self._region(name, held.tensor, local)
                            if held.start is None
                            else Region.span(held.start, local.numel())
                        ),
                        memory=Region(0, tuple(local.shape), local.stride()),
                    )
                found[name] = (local, layout)
        return all_held, found

    def _add_pieces(self, source: Source, layout: Layout) -> Iterable[Region]:
        """Regions of the engine-side tensor that are here, each entered as a piece."""
        here = layout.region
        if not here.numel or not source.region.numel:
            return ()
        if here.numel == Region.whole(layout.shape).numel:
            pairs = [(Region.whole(source.shape), source.region)]
        else:
            try:
                shared = source.region.intersect(here)
            except ValueError as error:
                raise UnsupportedError(
                    f"{source.name} is a transposed part of {source.parent}, which is sharded; that cannot be exported"
                ) from error
            pairs = aligned(
                (ordinals for region in shared for ordinals in source.region.locate(region)),
                (ordinals for region in shared for ordinals in here.locate(region)),
            )
        regions = [region.coalesce() for region, _ in pairs]
        for region, (_, local) in zip(regions, pairs, strict=True):
            self._pieces[source.name, region] = Piece(parent=source.parent, local=local)
        return regions

    def _find(self, bucket: Bucket, plan: Plan, group: Group) -> Sequence[_Spot] | None:
        """Where the tensors and chunks of `bucket` lie, if every rank has the tensors whole and contiguous."""
        found = []
        for meta in bucket.tensors:
            spec = plan.spec(meta.name)
            whole = {owner.rank for owner in spec.owners if owner.region.numel == spec.numel}
            place = self._in_place(meta.name, meta.shape)
            if place is None or len(whole) < group.world_size:
                return None
            parent, region = place
            found.append((parent, region if meta.is_whole else meta.elements.translate(region.offset)))
        return found

    def _placed(self, spots: Sequence[_Spot] | None) -> tuple[Sequence[str], tuple[Place, ...]] | None:
        """The same with parents in a list of their own."""
        if spots is None:
            return None
        numbers = {parent: number for number, parent in enumerate(dict.fromkeys(parent for parent, _ in spots))}
        places = tuple(
            Place(memory=numbers[parent], dtype=self._layouts[parent].dtype, region=region) for parent, region in spots
        )
        return tuple(numbers), places

    def _in_place(self, name: str, shape: tuple[int, ...]) -> _Spot | None:
        """The whole engine-side tensor where it lies contiguous in a parameter, or None."""
        region = Region.whole(shape)
        if not region.numel:
            return self._parents[name], region
        piece = self._pieces.get((name, region.coalesce()))
        if piece is None:
            return None
        memory = self._layouts[piece.parent].memory.select(piece.local)
        if len(memory) != 1 or memory[0].run_length != region.numel:
            return None
        return piece.parent, region.translate(memory[0].offset)

    def _digest(self, name: str) -> int:
        """Sum over the parts of one tensor of which this rank is the first holder, in wire dtype."""
        plan, group = self._prepared()
        spec = plan.spec(name)
        total = 0
        for region, ranks in holders_of(spec).items():
            if ranks[0] == group.rank:
                piece = self._pieces[name, region]
                tensors = self._readable({piece.parent})
                memory = self._layouts[piece.parent].memory.select(piece.local)
                parts = [memory_view(tensors[piece.parent], one).to(spec.dtype).reshape(-1) for one in memory]
                total += digest_part(torch.cat(parts).resolve_conj(), region, word_bytes=spec.word_bytes)
        return total % 2**64

    def _opened(self) -> Mapping[str, torch.Tensor]:
        if self._tensors is None:
            raise ProtocolError(f"the producer of this {self._kind} is not open; call open() first, and close() after")
        return self._tensors

    def _prepared(self) -> tuple[Plan, Group]:
        if self._plan is None or self._group is None:
            raise ProtocolError("this producer was not prepared: no plan was given to it")
        return self._plan, self._group

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outbox and inbox, as large as the largest bucket needs, kept over syncs."""
        if self._boxes is None:
            self._boxes = (
                self._allocate(max((exchange.outbox_nbytes for exchange in self._exchanges), default=0)),
                self._allocate(max((exchange.inbox_nbytes for exchange in self._exchanges), default=0)),
            )
        return self._boxes

    def _near(self, exchange: Exchange, slot: torch.Tensor | None) -> torch.Tensor | None:
        """`slot`, or memory on the device of the shards in place of one that is elsewhere and that others send to."""
        if slot is None or slot.device == self._device or not exchange.exchanged:
            return slot
        if self._beside is None or self._beside.numel() < slot.numel():
            self._beside = self._allocate(slot.numel())
        return self._beside

    def _compile(self, plan: Plan, senders: Sequence[int], group: Group) -> tuple[Exchange, ...]:
        gathers = GatherPlan(plan, senders, group.rank, group.world_size).buckets
        return tuple(compile_exchange(gather, self._pieces, self._layouts) for gather in gathers)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
