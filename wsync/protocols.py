"""The contracts. Trainers, engines and transports meet only here.

One sync, in the order of these classes:

    Producer --fill--> slot --Sender--> wire --Receiver--> views --Loader--> parameter
                                   Engine: begin ... finish | abort

After an error between `Engine.begin` and `Engine.finish` the engine is *torn* if any byte may have been written:
it holds no version and refuses to serve until a full sync succeeds. If nothing had been written it still serves its
old version. Each method says what it raises and what state it leaves.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.plan import Bucket, Plan, TensorSpec
from wsync.regions import Region
from wsync.topology import CPU, Endpoint, Topology

if TYPE_CHECKING:
    from wsync.group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """All that a receiver needs to reach its sender. Plain data: it travels in a control frame."""

    transport: str
    """Registered name of the transport."""

    address: str
    """Where to connect: a socket name, or a key in this process."""

    secret: bytes
    """32 random bytes; the receiver proves that it was invited."""

    generation: int
    """Grows with every sender of a session, so that a late receiver of an old one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one engine worker said of the tensors that it was offered, from a dry run of its own loader."""

    dtypes: Mapping[str, torch.dtype]
    """Source name -> dtype of the parameter that it is written to. Names that the worker left out are absent."""

    uses: Mapping[str, tuple[Region, ...]]
    """Source name -> parts of it that this worker reads. Joined over workers they must cover the source."""

    problems: tuple[str, ...]
    """One sentence each: unknown name, wrong shape, uncovered part of a parameter, refused dtype."""

    replayed: int
    """Tensors that the load plan copies directly."""

    through_loader: Mapping[str, str]
    """Source name -> why it goes through the engine's own loader at every sync."""

    verified: str
    """How the plan was checked against the launch weights, or why it could not be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What one engine worker says once it has loaded everything."""

    digests: Mapping[str, int]
    """Tensor -> its digest; empty if none were asked for."""

    seconds: Mapping[str, float]
    """Where the worker's time went: "wait" for buckets, "load", "finish" (the engine's post-load processing)."""


@runtime_checkable
class Producer(Protocol):
    """The trainer side of the data path, on one trainer rank.

    Methods marked *collective* are called by every trainer rank in the same order. The weights must not change from
    `open` until `close`.
    """

    @property
    def staging_bytes(self) -> int:
        """Scratch memory, in bytes, that this producer holds from one sync to the next."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this rank's weights are, once `metadata` was called. Slots are best there too."""
        ...

    def metadata(self) -> Sequence[TensorSpec]:
        """What this rank holds: the same names, shapes and dtypes on every rank, this rank's `owners` only.

        Local: no communication. Raises `UnsupportedError` naming the parameter that cannot be exported.
        """
        ...

    def prepare(self, plan: Plan, senders: Sequence[int], group: "Group") -> None:
        """Take the plan. `senders` are the trainer ranks whose `fill` gets a slot. Once per plan.

        Every rank calls it in the same order and hears if another one failed, so that it may hold rounds on `group`.
        """
        ...

    def open(self) -> None:
        """Look the parameters up afresh. Raises `MismatchError` if they no longer fit `metadata()` as first given.

        As in `prepare`, ranks may exchange something small; each first says whether it can.
        """
        ...

    def references(self, bucket: Bucket) -> Sequence[torch.Tensor] | None:
        """The bucket's tensors where they lie, one per `bucket.tensors`, if each lies whole in this process.

        A chunk is its elements, 1-D. They may have the trainer's dtype instead of the wire dtype. None: only `fill`
        can serve this bucket. The answer (None or not) is the same on every rank.
        """
        ...

    def stage(self, bucket: Bucket, slot: torch.Tensor | None) -> None:
        """Do everything local for `bucket` that may fail: peers are not yet waiting.

        Casts and copies this rank's own parts into `slot` (uint8, at least `bucket.nbytes`; None where not sending),
        and packs what other ranks need.
        """
        ...

    def fill(self, bucket: Bucket, slot: torch.Tensor | None) -> None:
        """*Collective.* Bring the other ranks' parts into the `slot` that `stage` was given. Transfers only.

        Uses wsync's own group only. When it returns, all bytes of the bucket are in `slot`.
        """
        ...

    def digests(self, names: Sequence[str]) -> Sequence[int]:
        """This rank's share of each tensor's digest over wire bytes; shares of all ranks add up modulo 2**64.

        A part held by several ranks is counted by its first owner only.
        """
        ...

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """*Collective, lazy.* Each (engine-side name, full tensor in the trainer's dtype); every rank must drain it.

        Between `open` and `close` only. Raises `ProtocolError` at the call if the producer is not open.
        """
        ...

    def close(self) -> None:
        """Drop every reference to the parameters."""
        ...


class Sender(Protocol):
    """The trainer's end of a transport: one ring of slots, one or more receivers."""

    by_reference: bool
    """Whether `hand_over` works: the receivers can read this process's tensors in place."""

    @property
    def held_bytes(self) -> int:
        """Memory of the slots that exist, in bytes."""
        ...

    def ticket(self) -> Ticket:
        """What receivers need to connect. The same for all; each adds its own index."""
        ...

    def accept(self, deadline: Deadline) -> None:
        """Wait until every receiver is connected. Raises `SyncTimeout` naming the absent indexes."""
        ...

    def acquire(self, deadline: Deadline) -> torch.Tensor:
        """The next free slot: uint8 `[slot_bytes]`, fixed address. Waits for the slowest receiver.

        Raises `PeerError` if a receiver died or failed, `SyncTimeout`, `ClosedError`, `TransportError` if slots are
        made when first used and there is no memory for one.
        """
        ...

    def commit(self, bucket: Bucket) -> None:
        """Publish the slot that `acquire` gave last as `bucket`. Returns before it is read."""
        ...

    def hand_over(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Publish `tensors` themselves as `bucket`. They must not change before the current stream after `drain`."""
        ...

    def drain(self, deadline: Deadline) -> None:
        """Wait until every receiver has released everything committed. Raises as `acquire`."""
        ...

    def close(self) -> None:
        """Release slots and sockets. Never raises; receivers see the end of the stream."""
        ...


class Receiver(Protocol):
    """The worker's end of a transport."""

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        """Each bucket of `plan` once, in order, with one tensor per `bucket.tensors`.

        The tensors are valid until the iterator is advanced: *advancing is the release*. The consumer must have
        queued all device work on them, on the current stream, and dropped every view by then; that the memory is
        written again only after that work is the transport's affair. `deadline` bounds each single wait anew.
        Raises `PeerError` if the sender is gone, `SyncTimeout`, `ProtocolError` if a bucket is out of order.
        """
        ...

    def fail(self, message: str) -> None:
        """Tell the sender why this receiver gives up. The sender's next wait raises `PeerError` with it."""
        ...

    def close(self) -> None:
        """Drop mappings and sockets. Never raises."""
        ...


class Transport(Protocol):
    """A way to move buckets from one trainer rank to engine workers."""

    name: str
    by_reference: bool
    """Whether its senders are."""

    def refuse(self, topology: Topology) -> str | None:
        """None if this transport can serve `topology`, else the reason, for people."""
        ...

    def sender(
        self, *, slot_bytes: int, num_slots: int, receivers: int, generation: int, device: torch.device = CPU
    ) -> Sender:
        """A sender of `num_slots` slots. Raises `TransportError` if the memory cannot be had.

        Args:
            slot_bytes: bytes of each slot.
            num_slots: how many.
            receivers: how many will connect.
            generation: see `Ticket`.
            device: where the producer's weights are.
        """
        ...

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> Receiver:
        """Connect receiver number `index`. Raises `PeerError` if the sender is gone or refuses, `SyncTimeout`."""
        ...


class Loader(Protocol):
    """The engine side of the data path, inside one worker. Holds no strong reference to the model between calls."""

    engine: str
    """Name and version of the engine, for messages."""

    def endpoint(self) -> Endpoint:
        """Where this worker's weights are."""
        ...

    def targets(self) -> Mapping[str, torch.Tensor]:
        """Live parameters and buffers by the engine's own names, looked up afresh. The load plan writes only these."""
        ...

    def required(self) -> Sequence[str]:
        """Names in `targets()` that a full sync must cover."""
        ...

    def accepts(self, name: str) -> bool:
        """Whether an optional tensor (a non-persistent buffer) of this source name is wanted."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The engine's own loader, in place. Called with meta tensors in the dry run, with real ones in a sync.

        In a sync it is called at most once, with a lazy iterable of tensors that are the callee's own, none of them a
        view of a slot: it may edit and keep them without a copy.
        """
        ...

    def launch_weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """The checkpoint that the engine was started with, streamed; None if it started from none (dummy weights)."""
        ...

    def begin(self) -> None:
        """Before the first byte of an attempt. What it changes, `finish` or `rollback` puts right."""
        ...

    def finish(self) -> None:
        """The engine's post-load processing, once. Waits for devices without `targets`. Raises on any leftover."""
        ...

    def rollback(self) -> None:
        """After a failed attempt: leave the model fit to take a new full sync. Weights may be a mix; worker is torn."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Control of one engine (one replica, any number of workers) from the trainer rank that owns it.

    Calls block, up to their deadline; the session runs long ones on a thread of its own. No call is made while an
    earlier one is unanswered: `describe`, `attach` and `begin` then raise `EngineStateError`, and later first end on
    the workers the attempt that was given up meanwhile.
    """

    name: str

    @property
    def replica(self) -> str:
        """Its own, unless engines of several trainer ranks are parts of one replica: then the same for all of them."""
        ...

    def endpoints(self) -> Sequence[Endpoint]:
        """Every worker, in the order of worker ranks."""
        ...

    def version(self) -> int:
        """Version that the engine serves; 0 for the launch weights. Raises `EngineStateError` if torn."""
        ...

    def last_version(self) -> int:
        """The newest version that a worker may ever have served, also while torn. Versions only grow."""
        ...

    def describe(self, specs: Sequence[TensorSpec], deadline: Deadline) -> Sequence[Manifest]:
        """Dry-run the loader of every worker on `specs`. Nothing is written."""
        ...

    def attach(self, plan: Plan, ticket: Ticket, first_index: int, deadline: Deadline) -> None:
        """Give every worker the plan and its receiver: worker i connects as `first_index + i`. Once per sender.

        The plan has no owners: they are the trainer's business.
        """
        ...

    @property
    def attachment(self) -> str | None:
        """Address of the ticket that the workers are attached with; None before `attach`, after `close`, a failure."""
        ...

    def begin(self, version: int, attempt: str, deadline: Deadline, *, digest: bool) -> None:
        """Pause is done; start every worker's loop. Returns at once, workers wait for buckets.

        Raises `EngineStateError` before any call if asleep or if the previous attempt still runs. State: updating.
        """
        ...

    def join(self, deadline: Deadline) -> Sequence[Loaded]:
        """Wait until every worker has loaded all of it, and hear what each one says.

        Raises `PeerError` with the worker's traceback, `SyncTimeout`. State after an error: torn.
        """
        ...

    def finish(self, version: int, attempt: str, deadline: Deadline) -> None:
        """Publish: every worker takes `version`, caches are dropped. Raises `EngineStateError` if `attempt` is over."""
        ...

    def abort(self, attempt: str, reason: str, deadline: Deadline, *, tear: bool = False) -> None:
        """End an attempt. A worker that had begun is torn; one that had not still serves. Never raises.

        With `tear` the engine ends torn in any case: its replica has other parts, which may be.
        """
        ...

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Stop generating and refuse new work. Raises `UnsupportedError` for a mode that the engine does not have.

        After an error nothing is paused.
        """
        ...

    def resume(self) -> None:
        """Generate again. Raises `EngineStateError` while torn, void or partly asleep."""
        ...

    def sleep(self, level: int = 2) -> None:
        """Release device memory. Level 1 keeps the weights in host memory, level 2 drops them.

        Raises `SyncTimeout` if the engine does not answer; then it counts as asleep.
        """
        ...

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back by tag, `weights` before `kv_cache`. After level 2 only a full sync makes it serve.

        Raises `SyncTimeout` if the engine does not answer; then it still counts as asleep.
        """
        ...

    def close(self, address: str | None = None) -> None:
        """Let the workers drop the receivers attached at `address` (None: any). The engine stays. Never raises."""
        ...
