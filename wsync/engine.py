"""The control half that every engine shares: calls to workers, attempts, states. Adapters say how to reach them.

serving(v) --begin--> updating --finish--> serving(v+1)
                          | failure before a byte was written      -> serving(v)
                          | failure after that, or no answer       -> torn
serving(v) --sleep(2)--> void: asleep, then awake without weights; only a full sync makes it serve
"""

import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch

from wsync import wire
from wsync.background import Background
from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.errors import EngineStateError, WsyncError
from wsync.live_tensors import read_live
from wsync.plan import Plan, TensorSpec
from wsync.protocols import Loaded, Manifest, Ticket
from wsync.pull.exports import Export, Probe
from wsync.replies import first_line, open_reply
from wsync.sleep import SleepingEngine
from wsync.topology import Endpoint

_PATIENCE_S = 120.0
"""Longest wait, in seconds, of calls that come without a deadline, before any came with one."""


class WorkerEngine(SleepingEngine):
    """An engine whose workers answer `call(method, payload)`, each through a `wsync.worker.Worker`.

    An adapter implements the abstract methods; every rule about order and state lives here, before any call. Each of
    them that waits raises `SyncTimeout` at its deadline.
    """

    def __init__(self) -> None:
        super().__init__()
        self._replica = uuid.uuid4().hex
        self._attachment: str | None = None
        self._version: int | None = None
        self._newest = 0
        self._torn: str | None = None
        self._attempt: str | None = None
        self._abandoned: str | None = None
        self._taking = 0
        self._patience_s = _PATIENCE_S
        self.read_seconds = 0.0
        self._paused = self._seen_awake = False
        self._update: Background[Sequence[Mapping[str, Any]]] | None = None

    # What an adapter provides.
    @property
    def resets_cache_meanwhile(self) -> bool:
        """Whether `on_reset_cache` may be called while the workers load, and does not wait for them."""
        return False

    @abstractmethod
    def call(self, method: str, payload: bytes, timeout_s: float | None) -> Sequence[bytes]:
        """Run `Worker.handle(method, payload)` on every worker; replies in rank order. Blocks.

        Raises `PeerError` if a worker is gone, `SyncTimeout` after `timeout_s` (None: as long as it takes).
        """

    @abstractmethod
    def guard(self, reason: str | None) -> None:
        """Refuse to serve with `EngineStateError(reason)` from now on; None: serve again."""

    @abstractmethod
    def on_pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """End or freeze what is in flight; new work is refused already, and again taken if this raises.

        Raises `UnsupportedError` for a mode that the engine lacks, before anything changed.
        """

    @abstractmethod
    def on_resume(self, deadline: Deadline) -> None:
        """Go on with what was frozen. New work is taken when this returns."""

    @abstractmethod
    def on_reset_cache(self, deadline: Deadline) -> None:
        """Forget every cached prefix. Raises `EngineStateError` if the engine kept any."""

    # The Engine protocol.

    @property
    def replica(self) -> str:
        """Its own, unless engines of several trainer ranks are parts of one replica: then the same for all of them."""
        return self._replica

    def endpoints(self) -> Sequence[Endpoint]:
        """Every worker, in the order of worker ranks."""
        return [cast("Endpoint", reply["endpoint"]) for reply in self._ask("hello", {}, self._patience())]

    def version(self) -> int:
        """Version that the engine serves; 0 for the launch weights. Raises `EngineStateError` if torn."""
        self.last_version()
        if self._torn is not None:
            raise EngineStateError(self._torn)
        assert self._version is not None
        return self._version

    def last_version(self) -> int:
        """The newest version that a worker may ever have served, also while torn. Versions only grow."""
        if self._version is None:
            replies = self._ask("hello", {}, self._patience())
            versions = sorted({int(reply["version"]) for reply in replies})
            self._version = self._newest = versions[-1]
            if len(versions) > 1 or any(reply["state"] != "serving" for reply in replies):
                states = ", ".join(f"{reply['state']} with version {reply['version']}" for reply in replies)
                self._tear(f"its workers were found {states}")
        return self._newest

    def describe(self, specs: Sequence[TensorSpec], deadline: Deadline) -> Sequence[Manifest]:
        """Dry-run the loader of every worker on `specs`. Nothing is written."""
        self._require_weights("describe its parameters")
        self._fence("describe its parameters", deadline)
        replies = self._ask("describe", {"specs": list(specs), "void": self._void}, deadline)
        return [cast("Manifest", reply["manifest"]) for reply in replies]

    def attach(self, plan: Plan, tickets: Sequence[Ticket], first_index: int, deadline: Deadline) -> None:
        """Give every worker the plan and its receivers: worker i connects as `first_index + i`."""
        self._fence("attach", deadline)
        message = {"plan": plan, "tickets": list(tickets), "first_index": first_index, "void": self._void}
        self._attachment = None
        self._ask("attach", message, deadline)
        self._attachment = tickets[0].address

    def probe(self, probes: Sequence[Probe], deadline: Deadline) -> Sequence[str]:
        """See `wsync.protocols.pull.PullingEngine`."""
        return [str(reply["reason"]) for reply in self._ask("probe", {"probes": list(probes)}, deadline)]

    def take_exports(self, exports: Sequence[Export], address: str, deadline: Deadline) -> float:
        """See `wsync.protocols.pull.PullingEngine`."""
        self._fence("hear of exports", deadline)
        message = {"exports": list(exports), "address": address}
        return max(float(reply["seconds"]) for reply in self._ask("exports", message, deadline))

    @property
    def attachment(self) -> str | None:
        """Address of the ticket that the workers are attached with; None before `attach`, after `close`, a failure."""
        return self._attachment

    def begin(self, version: int, attempt: str, deadline: Deadline, *, digest: bool) -> None:
        """Start every worker's loop and return at once. Raises `EngineStateError` before any update call."""
        if self._asleep or not self._seen_awake:  # `pause` has just looked: a look may be a call of the engine
            self._require_weights(f"take version {version}")
        self._fence(f"take version {version}", deadline)
        if self._attempt is not None:
            raise EngineStateError(f"{self.name}: attempt {self._attempt} is not over yet; finish or abort it first")
        if version <= self.last_version():
            raise EngineStateError(f"{self.name} was given version {self._newest}; {version} is not newer")
        self._attempt, self._taking, self._seen_awake = attempt, version, False
        message = {"version": version, "attempt": attempt, "timeout_s": deadline.timeout_s, "digest": digest}
        message |= {"void": self._void}
        try:
            self.guard(self._reason_not_to_serve())
            work = f"{self.name} to load version {version}"
            self._update = Background(work, lambda: self._ask("update", message, None))
        except BaseException:  # no thread, say
            self._attempt, self._abandoned = None, attempt
            self.guard(self._reason_not_to_serve())
            raise

    def join(self, deadline: Deadline) -> Sequence[Loaded]:
        """Wait until every worker has loaded all of it, if perhaps its device has not, and hear what each one says."""
        if self._update is None:
            raise EngineStateError(f"{self.name}: join without begin")
        if self.resets_cache_meanwhile:
            self.on_reset_cache(deadline)
        replies = self._update.result(deadline)
        return [Loaded(**reply) for reply in replies]

    def finish(self, version: int, attempt: str, deadline: Deadline) -> None:
        """Publish: caches are dropped, then every worker takes `version` as soon as its device has loaded all of it.

        Raises `EngineStateError`, with nothing changed, if `attempt` is over or has not been joined.
        """
        if self._attempt != attempt or self._taking != version or self._update is None:
            raise EngineStateError(f"{self.name}: attempt {attempt} for version {version} is over; sync again")
        if not self._update.done:
            raise EngineStateError(f"{self.name}: attempt {attempt} still runs; join it before finish")
        try:
            if not self.resets_cache_meanwhile:
                self.on_reset_cache(deadline)
            self._newest = version  # whatever comes of it: some worker may take it
            replies = self._ask("publish", {"version": version, "attempt": attempt}, deadline)
            self.read_seconds = max(float(reply["read_seconds"]) for reply in replies)
        except Exception as error:
            self._attempt = self._update = self._attachment = None
            self._tear(f"version {version} could not be published: {first_line(error)}")
            self._abandoned = attempt
            with suppress(WsyncError):  # then the next call tries again
                self._fence("end it", deadline)
            raise
        self._version, self._torn, self._void = version, None, False
        self._attempt = self._update = None
        self.guard(self._reason_not_to_serve())

    def abort(self, attempt: str, reason: str, deadline: Deadline, *, tear: bool = False) -> None:
        """End an attempt. If no worker had begun to write, the old version still serves; else torn. Never raises.

        With `tear` the engine ends torn in any case, also if the attempt is over or never began here: other parts of
        its replica may hold another version.
        """
        self._abort(attempt, reason, deadline)
        if tear and self._torn is None:
            self._tear(first_line(reason))

    def _abort(self, attempt: str, reason: str, deadline: Deadline) -> None:
        if self._update is None or self._attempt != attempt:
            return
        self._attachment = None  # the workers are through with that sender
        try:
            self._settle(deadline)
            self._ask("abort", {"attempt": attempt}, deadline)
            states = {(reply["state"], reply["version"]) for reply in self._ask("hello", {}, deadline)}
        except Exception as error:
            self._attempt, self._abandoned = None, attempt
            self._tear(f"{first_line(reason)}; and then a worker did not answer: {first_line(error)}")
            return
        self._attempt = self._update = None
        if states == {("serving", self._version)}:
            self.guard(self._reason_not_to_serve())
        else:
            self._tear(first_line(reason))

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Stop generating. Raises `UnsupportedError` for a mode that the engine does not have."""
        self._require_weights("be paused for a sync")
        self._seen_awake = True
        before, self._paused = self._paused, True
        self.guard(self._reason_not_to_serve())
        try:
            self.on_pause(mode, deadline)
        except BaseException:
            self._paused = before
            self.guard(self._reason_not_to_serve())
            raise
        self._resume_at_wake = False

    def resume(self) -> None:
        """Generate again, once all of it is awake. Raises `EngineStateError` while torn, void or updating."""
        if self._torn is not None or self._void or self._attempt is not None:
            raise EngineStateError(self._reason_not_to_serve())
        self._resume_at_wake = bool(self._asleep)
        if not self._asleep:
            self._go_on()

    @property
    def _is_updating(self) -> bool:
        return self._attempt is not None or self._is_unanswered

    @property
    def _is_unanswered(self) -> bool:
        return self._update is not None and not self._update.done

    def read(self, name: str, deadline: Deadline | None = None) -> Sequence[torch.Tensor]:
        """The live parameter or buffer `name` (the engine's own name) of every worker, copied to the host.

        For tests and doubts: it is slow. Raises `PeerError` if there is no such tensor.
        """
        self._require_weights(f"show {name}")
        return read_live(lambda message: self._ask("read", message, deadline or self._patience()), name)

    def close(self, address: str | None = None) -> None:
        """Let the workers drop the receivers attached at `address` (None: any). The engine stays. Never raises."""
        if address in (None, self._attachment):
            self._attachment = None
        if self._is_unanswered:
            return  # a worker that still reads must not lose its receiver; the next attach closes it
        try:
            self._ask("detach", {"address": address}, self._patience())
        except Exception:
            return  # a worker that is gone has dropped them

    def _patience(self) -> Deadline:
        return Deadline.after(self._patience_s)

    def _reason_not_to_serve(self) -> str | None:
        if self._attempt is not None:
            return f"{self.name} is taking version {self._taking}; it serves again when the sync is finished"
        if self._torn is not None:
            return self._torn
        if self._asleep:
            return f"{self.name} is asleep ({', '.join(sorted(self._asleep))}); call wake_up first"
        if self._void:
            return f"{self.name} has no weights since its level-2 sleep; sync it first"
        if self._paused:
            return f"{self.name} is paused for a sync; call resume"
        return None

    def _go_on(self) -> None:
        self.on_resume(self._patience())
        self._paused = False
        self.guard(self._reason_not_to_serve())

    def _require_weights(self, doing: str) -> None:
        if "weights" in self._asleep:
            raise EngineStateError(f"{self.name} is asleep and cannot {doing}; call wake_up(['weights']) first")

    def _fence(self, doing: str, deadline: Deadline) -> None:
        """End on the workers what was given up without an answer. Raises `EngineStateError` while that is open."""
        self._patience_s = deadline.timeout_s
        if self._is_unanswered:
            raise EngineStateError(
                f"{self.name} has not answered the previous sync yet and cannot {doing}; its worker may be stalled. "
                f"A new sync can start when it has, or after the engine is restarted"
            )
        if self._abandoned is not None:
            self._ask("abort", {"attempt": self._abandoned}, deadline)
            self._abandoned = None

    def _tear(self, reason: str) -> None:
        self._torn = f"{self.name} holds no consistent version and refuses to serve: {reason}. Sync it again"
        self.guard(self._torn)

    def _settle(self, deadline: Deadline) -> None:
        """Wait for the update call to end, whatever its outcome: no new call is made while it is unanswered."""
        assert self._update is not None
        try:
            self._update.result(deadline)
        except WsyncError:
            if not self._update.done:
                raise

    def _ask(
        self, method: str, message: Mapping[str, object], deadline: Deadline | None
    ) -> Sequence[Mapping[str, Any]]:
        """Call every worker, which may wait as long, and open the replies. Raises `PeerError` with its traceback."""
        timeout_s = deadline.remaining(f"{self.name} to answer {method!r}") if deadline is not None else None
        replies = self.call(method, wire.pack({"timeout_s": timeout_s, **message}), timeout_s)
        return [open_reply(data, self.name, rank, method) for rank, data in enumerate(replies)]
