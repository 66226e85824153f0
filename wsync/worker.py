"""The engine-side half of a sync, in the process that holds one worker's weights.

`Worker.handle` answers one control frame with another. What each method takes and gives:

    hello                                          engine, endpoint, version, state, reason
    describe  specs, void                          manifest
    attach    plan, tickets, first_index, timeout_s, void
    probe     probes                               reason
    exports   exports, address                     seconds
    update    version, attempt, timeout_s, digest, void  digests, seconds, pulled_nbytes
    publish   version, attempt, timeout_s          version, read_seconds
    abort     attempt, timeout_s                   state
    read      name, start, count                   dtype, shape, nbytes, data
    detach    address (None: any)
"""

import threading
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from wsync import registry, wire
from wsync.deadline import Deadline
from wsync.device import current_device
from wsync.device_work import Events, queued, wait_for
from wsync.digest import digest
from wsync.errors import EngineStateError, MismatchError, ProtocolError, first_five
from wsync.loadplan import LoadPlan, Write
from wsync.manifest import declared_dtypes, manifest
from wsync.plan import Bucket, Plan, TensorSpec, as_bytes
from wsync.protocols import Loader, Manifest, Receiver, Ticket, Transport
from wsync.pull.exports import Export, Probe
from wsync.pull.sources import Sources, unreadable
from wsync.record import record, writable
from wsync.replay import Arrivals, Replay, Routine
from wsync.report import Stopwatch
from wsync.state import State, StateMachine
from wsync.targets import all_held
from wsync.traits import cuda_devices
from wsync.transports.nothing import NoReceiver
from wsync.transports.turns import SteppingReceiver, TurnsReceiver
from wsync.verify import check_launch_weights

Message = Mapping[str, Any]


@dataclass(slots=True)
class _Attachment:
    """What `attach` made: where buckets come from and what is done with them."""

    address: str
    loader: Loader
    plan: Plan
    sent: Plan
    """The part of it that travels."""

    routine: Routine
    receiver: Receiver
    sources: Sources | None = None
    """Where the bucket that does not travel is read."""

    failed: bool = False
    """Not used any more, but open until `detach`, so that the sender can read why."""


class Worker:
    """One worker's answers. `abort`, `hello` and `detach` may come on another thread while `update` runs."""

    def __init__(
        self,
        loader: Loader,
        *,
        rank: int = 0,
        transport: Callable[[str], Transport] = registry.transport,
        on_state: Callable[[State], None] = lambda state: None,
    ) -> None:
        """Nothing is done before the first call.

        Args:
            loader: the engine side of the data path.
            rank: this worker's place among the workers of its engine.
            transport: looks a transport up by its name.
            on_state: told of every change of state, so that an engine can refuse to serve.
        """
        self._loader, self._rank, self._transport = loader, rank, transport
        self._states = StateMachine(on_state)
        self._load: LoadPlan | None = None
        self._verdict: tuple[tuple[Write, ...], tuple[str, Sequence[str]]] | None = None
        self._attachment: _Attachment | None = None
        self._queued: Events = ()  # by the last update
        self._broken = False  # a sync of all weights was begun and not finished
        self._detaching = threading.Lock()
        self._methods: dict[str, Callable[[Message], Message]] = {
            "hello": self._hello,
            "describe": self._describe,
            "attach": self._attach,
            "probe": self._probe,
            "exports": self._exports,
            "update": self._update,
            "publish": self._publish,
            "abort": self._abort,
            "read": self._read,
            "detach": self._detach,
        }

    @property
    def state(self) -> State:
        """The state now."""
        return self._states.state

    def handle(self, method: str, payload: bytes) -> bytes:
        """Answer one frame: `{"ok": ...}` or `{"error": {"type", "message", "traceback"}}`. Never raises."""
        try:
            message = wire.unpack(payload)
            if method not in self._methods or not isinstance(message, dict):
                raise ProtocolError(f"no worker method {method!r} with a {type(message).__name__}")
            return wire.pack({"ok": dict(self._methods[method](message))})
        except Exception as error:
            text = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
            return wire.pack({"error": text})

    def _hello(self, message: Message) -> Message:
        state = self.state
        return {
            "engine": self._loader.engine,
            "endpoint": self._loader.endpoint(),
            "version": state.version,
            "state": state.kind,
            "reason": state.reason,
        }

    def _describe(self, message: Message) -> Message:
        self._states.require_idle("describe its parameters")
        specs = cast("Sequence[TensorSpec]", message["specs"])
        return {"manifest": self._examine(specs, bool(message.get("void", False)))}

    def _examine(self, specs: Sequence[TensorSpec], void: bool) -> Manifest:
        """Dry-run the loader, a second time if it wants other dtypes than the trainer has."""
        load = self._record(specs)
        declared = declared_dtypes(load)
        if any(load.specs[name].dtype != dtype for name, dtype in declared.items()):
            wanted = [replace(spec, dtype=declared.get(name, spec.dtype)) for name, spec in load.specs.items()]
            load = self._record(wanted)
        self._load = load
        loader = self._loader
        targets, required = loader.targets(), loader.required()
        launch = self._check_launch(load, void)
        return manifest(load, targets, required, engine=loader.engine, endpoint=loader.endpoint(), launch=launch)

    def _check_launch(self, load: LoadPlan, void: bool) -> tuple[str, Sequence[str]]:
        """The launch weights can be compared only while they are there; what was found then holds on.

        It also holds for other wire dtypes, if the same regions are written.
        """
        if self._verdict is not None and self._verdict[0] == load.writes:
            return self._verdict[1]
        if void or self.state.kind != "serving" or self.state.version:
            return "unverified: the launch weights are no longer in the engine", ()
        verdict = check_launch_weights(self._loader, load)
        self._verdict = (load.writes, verdict)
        return verdict

    def _record(self, specs: Sequence[TensorSpec]) -> LoadPlan:
        try:
            return record(self._loader, specs)
        except EngineStateError as error:
            self._broken |= self._loader.whole
            self._states.tear(str(error))
            raise

    def _attach(self, message: Message) -> Message:
        self._states.require_idle("attach")
        self._detach({"address": None})
        plan, tickets = cast("Plan", message["plan"]), cast("Sequence[Ticket]", message["tickets"])
        load = self._load
        if load is None or not load.matches({spec.name: spec for spec in plan.specs}):
            load = self._load = self._record(plan.specs)
            _, wrong = self._check_launch(load, bool(message.get("void", False)))
            if problems := [*load.problems, *wrong]:
                raise MismatchError(f"{self._loader.engine} does not take this plan: {first_five(problems)}")
        routine = Routine.compile(load, plan)
        index = int(message["first_index"]) + self._rank
        deadline = Deadline.after(float(message["timeout_s"]))
        receiver: Receiver = NoReceiver()
        if plan.sent.buckets:
            with current_device(self._loader.endpoint().device):
                receiver = self._receiver(tickets, index, deadline)
        with self._detaching:
            self._attachment = _Attachment(tickets[0].address, self._loader, plan, plan.sent, routine, receiver)
        return {}

    def _receiver(self, tickets: Sequence[Ticket], index: int, deadline: Deadline) -> Receiver:
        receivers: list[Receiver] = []
        try:
            for ticket in tickets:
                receivers.append(self._transport(ticket.transport).receiver(ticket, index, deadline))
        except BaseException:
            for receiver in receivers:
                receiver.close()
            raise
        if len(receivers) == 1:
            return receivers[0]
        return TurnsReceiver(cast("Sequence[SteppingReceiver]", receivers))

    def _probe(self, message: Message) -> Message:
        return {"reason": unreadable(cast("Sequence[Probe]", message["probes"]), self._loader.endpoint())}

    def _exports(self, message: Message) -> Message:
        self._states.require_idle("hear where weights lie")
        attachment, exports = self._attachment, cast("Sequence[Export]", message["exports"])
        if attachment is None or attachment.plan.pulled is None:
            raise EngineStateError("no plan is attached that has anything to pull")
        if attachment.address != message["address"]:
            raise EngineStateError("another session took the engine since this one attached it; sync again")
        bucket, watch = attachment.plan.pulled, Stopwatch()
        routine, here = attachment.routine, attachment.loader.endpoint()
        dtypes = {name: layout.dtype for name, layout in routine.load.layouts.items()}
        if attachment.sources is not None:
            attachment.sources.close()
            attachment.sources = None
        attachment.sources = Sources(bucket, routine.steps[bucket.index], dtypes, exports, here)
        return {"seconds": watch.seconds}

    def _detach(self, message: Message) -> Message:
        address = message["address"]
        with self._detaching:
            attachment = self._attachment
            if attachment is None or address not in (None, attachment.address):
                return {}
            self._attachment = None
        attachment.receiver.close()
        if attachment.sources is not None:
            attachment.sources.close()
        return {}

    def _update(self, message: Message) -> Message:
        version, attempt = int(message["version"]), str(message["attempt"])
        attachment = self._attachment
        if attachment is None or attachment.failed:
            raise EngineStateError(f"no sender is attached; attach before version {version}")
        try:
            self._check_base(attachment.loader, bool(message.get("void", False)))
            self._states.begin(version, attempt)
        except BaseException as error:
            if self.state.kind != "updating":  # else the sender is that of the attempt that runs
                attachment.failed = True
                attachment.receiver.fail(f"{type(error).__name__}: {error}")
            raise
        deadline = Deadline.after(float(message["timeout_s"]))
        try:
            digests = _Digests(attachment.plan) if message["digest"] else None
            return self._take(attachment, attempt, deadline, digests)
        except BaseException as error:
            attachment.failed = True
            self._fail(attachment, attempt, f"{type(error).__name__}: {error}", deadline.restart())
            raise

    def _check_base(self, loader: Loader, void: bool) -> None:
        """Raise `EngineStateError` if `loader` takes a part of the weights, and the others are not there."""
        if not loader.whole and (void or self._broken):
            reason = "a sync of them failed" if self._broken else "a sleep of level 2 dropped them"
            raise EngineStateError(
                f"{loader.engine} has no whole base weights, as {reason}, and an adapter alone does not bring them "
                f"back; sync all weights first (with adapters, sleep at level 1, which keeps the base weights)"
            )

    def _take(self, attachment: _Attachment, attempt: str, deadline: Deadline, digests: "_Digests | None") -> Message:
        """Load everything that arrives: when this returns devices may still be at it, and `_queued` says so.

        Raises what goes wrong; the caller ends the attempt.
        """
        loader, watch = attachment.loader, Stopwatch()
        with watch.stage("load"):
            loader.begin()
            targets = loader.targets()
            arrivals = self._arrivals(attachment, attempt, deadline, digests, watch)
            with writable(targets):
                replay = Replay(attachment.routine, targets)
                replay.run(arrivals, loader.load_weights, lambda: self._writing(loader, attempt))
            pulled_nbytes = replay.pulled_nbytes
            del replay
            devices = _devices(targets)
            del targets
        with watch.stage("finish"):
            loader.finish()
            self._queued = queued(devices)
        self._states.loaded(attempt)
        load, wait = watch.stages["load"], watch.stages["wait"]
        seconds = {"wait": wait, "load": load - wait, "finish": watch.stages["finish"]}
        found = digests.values if digests is not None else {}
        return {"digests": found, "seconds": seconds, "pulled_nbytes": pulled_nbytes}

    def _writing(self, loader: Loader, attempt: str) -> None:
        self._states.writing(attempt)
        self._broken |= loader.whole

    def _arrivals(
        self,
        attachment: _Attachment,
        attempt: str,
        deadline: Deadline,
        digests: "_Digests | None",
        watch: Stopwatch,
    ) -> Arrivals:
        """Buckets as they come, each one only while the attempt is under way."""
        buckets, patience = iter(attachment.receiver.buckets(attachment.sent, deadline)), deadline
        while True:
            with watch.stage("wait"):
                item = next(buckets, None)
            self._states.check(attempt)
            if item is None:
                break
            if digests is not None:
                digests.add(*item)
            yield item
            del item  # advancing releases the slot
            patience = deadline.restart()
        if attachment.plan.pulled is not None:
            if attachment.sources is None:
                raise EngineStateError("nobody said where the weights lie that are to be pulled")
            patience.remaining("its turn to read the trainer's weights: they may be others by now")
            yield attachment.plan.pulled, attachment.sources

    def _fail(self, attachment: _Attachment, attempt: str, reason: str, deadline: Deadline) -> None:
        """Tell the sender, put the model in order, and say what the worker is now. Nothing is read any more then."""
        attachment.receiver.fail(reason)
        with suppress(Exception):  # of a device that failed too, or does not come to an end
            wait_for(queued(_devices(attachment.loader.targets())), deadline)
        try:
            attachment.loader.rollback()
        except Exception as error:
            self._states.end(attempt, reason)
            self._states.tear(f"{reason}; and its rollback failed: {type(error).__name__}: {error}")
            raise
        self._states.end(attempt, reason)

    def _publish(self, message: Message) -> Message:
        version = int(message["version"])
        wait_for(self._queued, Deadline.after(float(message["timeout_s"])))
        self._states.publish(version, str(message["attempt"]))
        attachment = self._attachment
        if attachment is not None and attachment.loader.whole:
            self._broken = False
        sources = attachment.sources if attachment is not None else None
        return {"version": version, "read_seconds": sources.seconds if sources is not None else 0.0}

    def _abort(self, message: Message) -> Message:
        """A running update finds out at its next bucket, and rolls back on its own thread.

        What it had queued is done when this returns: the trainer's memory is not read any more.
        """
        state = self._states.abort(str(message["attempt"]))
        with suppress(RuntimeError):  # a device that failed reads nothing
            wait_for(self._queued, Deadline.after(float(message["timeout_s"])))
        return {"state": state.kind}

    def _read(self, message: Message) -> Message:
        """Bytes `start .. start + count` of a live parameter or buffer, by the engine's own name."""
        name, start, count = str(message["name"]), int(message["start"]), int(message["count"])
        targets = self._loader.targets()
        if name not in targets:
            raise MismatchError(f"{self._loader.engine} has no tensor {name!r}; it has {first_five(sorted(targets))}")
        tensor = targets[name]
        data = as_bytes(tensor)
        return {
            "dtype": tensor.dtype,
            "shape": tuple(tensor.shape),
            "nbytes": data.numel(),
            "data": data[start : start + count].cpu().numpy().tobytes(),
        }


def _devices(targets: Mapping[str, torch.Tensor]) -> Collection[torch.device]:
    with torch._C.DisableTorchFunctionSubclass():
        return cuda_devices(all_held(targets))


class _Digests:
    """Digests of what arrived, by tensor."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.values: dict[str, int] = {}

    def add(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Count one bucket in."""
        for meta, tensor in zip(bucket.tensors, tensors, strict=True):
            unit = self._plan.spec(meta.name).word_bytes
            share = digest(tensor.to(meta.dtype), word_bytes=unit, first_word=meta.chunk_offset // unit)
            self.values[meta.name] = (self.values.get(meta.name, 0) + share) % (1 << 64)
