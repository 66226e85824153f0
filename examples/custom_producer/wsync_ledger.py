"""A trainer and an engine that wsync has never heard of, taught to it by one distribution with two entry points.

`Ledger` is the trainer: named tensors, the same on every rank, no module anywhere. `Lookup` is the engine: it answers
questions about rows of its tables. Below each is what wsync needs to know about it.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.digest import digest
from wsync.engine import WorkerEngine
from wsync.errors import EngineStateError, MismatchError, ProtocolError, UnsupportedError
from wsync.group import Group
from wsync.plan import Bucket, Owner, Plan, TensorSpec
from wsync.regions import Region
from wsync.topology import Endpoint, local_endpoint
from wsync.worker import Worker


class Ledger:
    """The trainer. Whoever owns it changes `weights` between syncs."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = dict(weights)


class LedgerProducer:
    """Exports a `Ledger`. Every rank has all of it, so that nothing is exchanged: `fill` has nothing to do."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = weakref.ref(ledger)
        self._shapes: dict[str, tuple[object, ...]] = {}
        self._open: dict[str, torch.Tensor] | None = None

    @staticmethod
    def matches(obj: object) -> bool:
        """Asked of every actor: cheap, and imports no framework."""
        return isinstance(obj, Ledger)

    @property
    def device(self) -> torch.device:
        """Host memory."""
        return torch.device("cpu")

    @property
    def staging_bytes(self) -> int:
        """No scratch memory outlives a sync."""
        return 0

    def metadata(self) -> Sequence[TensorSpec]:
        """What there is. Each rank says that it owns all of every tensor; ranks are numbered by wsync."""
        weights = self._weights()
        self._shapes = {name: (weight.shape, weight.dtype) for name, weight in weights.items()}
        return [
            TensorSpec(
                name=name,
                shape=tuple(weight.shape),
                dtype=weight.dtype,
                owners=(Owner(rank=0, region=Region.whole(weight.shape)),),
            )
            for name, weight in weights.items()
        ]

    def prepare(self, plan: Plan, senders: Sequence[int], group: Group) -> None:
        """Which tensor lies where in which bucket, and in which dtype it travels."""
        self._plan, self._group = plan, group

    def open(self) -> None:
        """Look everything up afresh. From here to `close` the weights do not change."""
        weights = self._weights()
        now = {name: (weight.shape, weight.dtype) for name, weight in weights.items()}
        if now != self._shapes:
            raise MismatchError("the ledger has other tensors than at connect; connect again")
        self._open = weights

    def references(self, bucket: Bucket) -> Sequence[torch.Tensor] | None:
        """The tensors themselves, for engines in this process; None if one does not lie as it would travel."""
        weights = self._opened()
        if not all(weights[meta.name].is_contiguous() for meta in bucket.tensors):
            return None
        return [_part(weights[meta.name], meta.elements, meta.is_whole) for meta in bucket.tensors]

    def confirm(self) -> bool:
        """`open` has looked at everything."""
        return True

    def stage(self, bucket: Bucket, slot: torch.Tensor | None) -> None:
        """Copy this rank's parts, with the cast to the wire dtype in it."""
        weights = self._opened()
        if slot is not None:
            for meta, place in bucket.views(slot):
                place.copy_(_part(weights[meta.name], meta.elements, meta.is_whole))

    def fill(self, bucket: Bucket, slot: torch.Tensor | None) -> None:
        """Exchange with other ranks: a sharded trainer would call `group.transfer` here."""

    def digests(self, names: Sequence[str]) -> Sequence[int]:
        """Of the bytes that travel; what several ranks hold is counted by the first one."""
        weights, first = self._opened(), self._group.rank == 0
        specs = [self._plan.spec(name) for name in names]
        return [digest(weights[s.name].to(s.dtype), word_bytes=s.word_bytes) if first else 0 for s in specs]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All of it in the trainer's own dtype."""
        return iter(self._opened().items())

    def close(self) -> None:
        """Let go of the weights."""
        self._open = None

    def _weights(self) -> dict[str, torch.Tensor]:
        ledger = self._ledger()
        if ledger is None:
            raise MismatchError("the ledger is gone; keep a reference to it")
        return dict(ledger.weights)

    def _opened(self) -> dict[str, torch.Tensor]:
        if self._open is None:
            raise ProtocolError("open the producer first")
        return self._open


def _part(weight: torch.Tensor, elements: Region, whole: bool) -> torch.Tensor:
    """All of a tensor in its shape, or the elements of a chunk, 1-D."""
    return weight if whole else weight.reshape(-1)[elements.offset : elements.offset + elements.numel]


class Lookup:
    """The engine. It answers from its tables unless wsync has told it not to."""

    def __init__(self, tables: Mapping[str, torch.Tensor]) -> None:
        self.tables = {name: table.detach().clone() for name, table in tables.items()}
        self.refusal: str | None = None

    def answer(self, row: int) -> list[float]:
        """One number from each table. Raises `EngineStateError` while the tables are not fit to answer from."""
        if self.refusal is not None:
            raise EngineStateError(self.refusal)
        return [float(table.reshape(-1)[row]) for table in self.tables.values()]


class LookupLoader:
    """The data path inside the worker: where bytes go. wsync runs `load_weights` dry, and then copies by itself."""

    engine = "lookup 0.1"
    whole = True

    def __init__(self, lookup: Lookup) -> None:
        self._tables = lookup.tables

    def endpoint(self) -> Endpoint:
        """Where this worker is."""
        return local_endpoint("cpu")

    def targets(self) -> Mapping[str, torch.Tensor]:
        """The live tensors, looked up afresh."""
        return self._tables

    def required(self) -> Sequence[str]:
        """What a sync must cover."""
        return list(self._tables)

    def accepts(self, name: str) -> bool:
        """Buffers that no checkpoint has: none are wanted."""
        return False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The engine's own loading code, in place."""
        for name, tensor in weights:
            if name not in self._tables:
                raise MismatchError(f"{name}: there is no such table")
            self._tables[name].copy_(tensor)

    def launch_weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """The checkpoint that it was started from, to verify the plan with: none."""
        return None

    def begin(self) -> None:
        """Nothing to prepare."""

    def finish(self) -> None:
        """Nothing to process."""

    def rollback(self) -> None:
        """Nothing to undo."""


# What one session leaves behind (torn, asleep) must be known to the next: one engine for each Lookup.
_engines: "weakref.WeakKeyDictionary[Lookup, LookupEngine]" = weakref.WeakKeyDictionary()


class LookupEngine(WorkerEngine):
    """The control half. `WorkerEngine` knows the rules about order, versions and states; this knows the engine."""

    name = "lookup"

    def __new__(cls, lookup: Lookup) -> "LookupEngine":
        """The engine of `lookup`, made by the first call."""
        engine = _engines.get(lookup)
        if engine is None:
            engine = _engines[lookup] = super().__new__(cls)
            WorkerEngine.__init__(engine)
            engine._lookup = weakref.ref(lookup)
            engine._worker = Worker(LookupLoader(lookup))
            engine._kept = {}
        return engine

    def __init__(self, lookup: Lookup) -> None:
        """All is done in `__new__`: this runs on every call, also for an engine that is in use."""

    _lookup: "weakref.ref[Lookup]"
    _worker: Worker
    _kept: dict[str, torch.Tensor]

    @staticmethod
    def matches(obj: object) -> bool:
        """Asked of every engine object."""
        return isinstance(obj, Lookup)

    def call(self, method: str, payload: bytes, timeout_s: float | None) -> Sequence[bytes]:
        """Reach every worker, one frame there and one back. Here there is one, in this process."""
        return [self._worker.handle(method, payload)]

    def guard(self, reason: str | None) -> None:
        """Refuse to serve, or serve again."""
        lookup = self._lookup()
        if lookup is not None:
            lookup.refusal = reason

    def on_pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """No answer takes long enough to be waited for."""
        if mode == "keep":
            raise UnsupportedError("lookup has nothing in flight that it could keep; pause with wait or abort")

    def on_resume(self, deadline: Deadline) -> None:
        """Nothing was held back."""

    def on_reset_cache(self, deadline: Deadline) -> None:
        """There is no cache."""

    def on_sleep(self, level: int, deadline: Deadline) -> None:
        """Free the tables, but not the tensor objects."""
        for name, table in self._tables().items():
            if level == 1:
                self._kept[name] = table.clone()
            table.untyped_storage().resize_(0)

    def on_wake_up(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Allocate the tables again, and put back what was kept."""
        if "weights" in tags:
            for name, table in self._tables().items():
                table.untyped_storage().resize_(table.numel() * table.itemsize)
                if name in self._kept:
                    table.copy_(self._kept.pop(name))

    def _tables(self) -> Mapping[str, torch.Tensor]:
        lookup = self._lookup()
        return lookup.tables if lookup is not None else {}
