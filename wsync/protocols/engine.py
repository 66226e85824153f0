"""The contract of an engine: how a sync pauses it, starts its workers, and publishes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.plan import Plan, TensorSpec
from wsync.protocols.loader import Manifest
from wsync.protocols.transport import Ticket
from wsync.topology import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What one engine worker says once it has loaded everything."""

    digests: Mapping[str, int]
    """Tensor -> its digest; empty if none were asked for."""

    seconds: Mapping[str, float]
    """Where the worker's time went: "wait" for buckets, "load", "finish" (the engine's post-load processing)."""

    pulled_nbytes: int = 0
    """Bytes that the worker read where trainer ranks have them."""


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

    def attach(self, plan: Plan, tickets: Sequence[Ticket], first_index: int, deadline: Deadline) -> None:
        """Give every worker the plan and its receivers: worker i connects as `first_index + i`, to every ticket.

        There is one ticket, or one for each of the plan's `turns`, in their order. The plan has no owners: they are the
        trainer's business.
        """
        ...

    @property
    def attachment(self) -> str | None:
        """Address of the first ticket that workers are attached to; None before `attach`, after `close`, a failure."""
        ...

    def begin(self, version: int, attempt: str, deadline: Deadline, *, digest: bool) -> None:
        """Pause is done; start every worker's loop. Returns at once, workers wait for buckets.

        Raises `EngineStateError` before any call if asleep or if the previous attempt still runs. State: updating.
        """
        ...

    def join(self, deadline: Deadline) -> Sequence[Loaded]:
        """Wait until every worker has loaded all of it, and hear what each one says. Devices may still be at it.

        Raises `PeerError` with the worker's traceback, `SyncTimeout`. State after an error: torn.
        """
        ...

    def finish(self, version: int, attempt: str, deadline: Deadline) -> None:
        """Publish: every worker takes `version` once its device is done, caches are dropped.

        The trainer's memory is not read any more when this returns, nor after `abort`. Raises `EngineStateError` if
        `attempt` is over.
        """
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

    @property
    def asleep(self) -> Collection[str]:
        """Tags of which the device memory is away, of "weights" and "kv_cache"."""
        ...

    def check_sleep(self, tags: Sequence[str] | None = None) -> None:
        """Raise what `sleep` would refuse those tags with, before anything changes: it lacks that, or its state."""
        ...

    def sleep(self, level: int = 2, tags: Sequence[str] | None = None) -> None:
        """Release device memory. Level 1 keeps the weights in host memory, level 2 drops them.

        Level 0 keeps everything, and what is in flight waits until `wake_up`, without tags or with "scheduling".
        `tags` are all, or "kv_cache" alone: then the weights stay, and can be synced.
        Raises `SyncTimeout` if the engine does not answer; then it counts as asleep. `UnsupportedError` if it cannot
        release these tags alone, or cannot freeze requests.
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
