"""One trainer and its engines, connected: the loop that every sync runs through.

    all ranks    begin: who is here, which version, which attempt
    all ranks    look the parameters up; where workers pull, owners pause their engines meanwhile
    owners       pause the engine, start its workers
    all ranks    per bucket: acquire slot, stage | go/stop | fill, commit
    owners       drain, join the workers, compare digests
    all ranks    loaded everywhere?
    owners       publish
    all ranks    where workers pulled: is everybody still here?
    owners       resume

An error at any point is heard by every rank before its next step. An engine that was not touched serves its old
version again, one that had already published and did not pull serves the new one, the others are torn. The next sync
connects slots and sockets afresh.
"""

import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

import torch

from wsync.config import SyncConfig
from wsync.deadline import Deadline
from wsync.digest import check_digests
from wsync.errors import ClosedError, ConfigError, WsyncError
from wsync.explain import explain
from wsync.group import Group
from wsync.handshake import Agreement, connect_ranks
from wsync.lines import Line, check_intact, open_lines, open_turns, slots_bytes
from wsync.plan import Bucket
from wsync.protocols import Engine, Loaded, Producer, Transport
from wsync.protocols.pull import ExportingProducer, PullingEngine
from wsync.pull.ranks import Ranks
from wsync.report import Stopwatch, SyncReport


class Session:
    """A trainer connected to its engines. Every trainer rank holds one and makes the same calls in the same order.

    Use it as a context manager, or `close` it. `wsync.connect` makes one.
    """

    def __init__(
        self,
        producer: Producer,
        engines: Sequence[Engine],
        transports: Sequence[Transport],
        group: Group,
        config: SyncConfig,
    ) -> None:
        """*Collective.* Connect: compare both sides and plan. No weight is moved. Raises as `connect_ranks`."""
        self.config = config
        self.engines = tuple(engines)
        self._producer = producer
        self._group = group
        self._lines: list[Line] = []
        self._attached = False
        self._closed = False
        self._pulled_nbytes = 0
        self._doubtful = False  # a rank may have left, and changed its weights, before all of them were read
        self._busy = threading.Lock()
        self._agreement: Agreement = connect_ranks(producer, engines, transports, group, config)
        self._sent = self._agreement.plan.sent
        self._staging = self._agreement.staging
        pulled, exporting = self._agreement.plan.pulled, cast("ExportingProducer", producer)
        self._ranks = None if pulled is None else Ranks(exporting, pulled, self._staging, group)

    def sync(self, version: int | None = None) -> SyncReport:
        """*Collective.* Bring every engine to the trainer's present weights.

        Args:
            version: number that the engines serve afterwards; default: one more than the newest of them.

        Raises:
            ConfigError: `version` does not grow, or a sync of this session is running. Nothing was moved.
            RankError: another trainer rank failed or did not call.
            PeerError, SyncTimeout, TransportError, DigestError, EngineStateError, MismatchError: see `wsync.errors`.
        """
        if self._closed:
            raise ClosedError("this session is closed; connect again")
        if not self._busy.acquire(blocking=False):
            raise ConfigError("a sync of this session is running; one session does one at a time")
        try:
            return self._run(version)
        except _OutdatedError:  # now the producers look closely
            return self._run(version)
        finally:
            self._busy.release()

    @property
    def token(self) -> str:
        """The same on every rank of this session, and on no other session."""
        return self._agreement.token

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def explain(self) -> str:
        """What was agreed at connect: plan, transport and why not the others, how tensors are loaded."""
        return explain(self._agreement, self.engines, self._group)

    @property
    def slot_bytes(self) -> int:
        """Bytes of slots and staging that the next sync will allocate on this rank, at most: 0 if it has them already.

        An actor that lies whole in the process of its engine needs none.
        """
        attached, choices = self._attached, self._agreement.choices
        slots = 0 if attached else slots_bytes(choices, self._sent, self.config, self._group)
        return slots + self._staging.missing_bytes

    def release_slots(self) -> None:
        """*Collective.* Give slots, staging, sockets and communicators back until the next sync, which makes new ones.

        When it returns no worker has memory of any rank mapped, but for one that warns of it: freed, it is free.

        Raises `RankError` if another rank did not call.
        """
        self._group.enter()
        self._group.local("release", self._unmap, self._deadline())
        self._detach()
        self._group.reset()
        self._staging.release()

    def close(self) -> None:
        """Release slots, staging, sockets and the communicator. The engines stay as they are. Never raises.

        Local: workers of another rank's engines may have memory of this one mapped until that rank has closed too.
        """
        if not self._closed:
            self._closed = True
            self._unmap()
            self._detach()
            self._staging.release()
            self._group.close()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _deadline(self) -> Deadline:
        return Deadline.after(self.config.timeout_s)

    def _run(self, version: int | None) -> SyncReport:
        watch = Stopwatch()
        self._group.enter()
        with watch.stage("begin"):
            version, attempt, attached = self._begin(version)
        try:
            if not attached:
                with watch.stage("attach"):
                    self._attach()
            pause_seconds = self._transfer(version, attempt, watch)
        except BaseException as error:
            self._give_up(attempt, error)
            if self._agreement.turns is not None:
                self._group.blame(error)
            raise
        finally:
            self._producer.close()
        return self._report(version, watch, pause_seconds)

    def _begin(self, version: int | None) -> tuple[int, str, bool]:
        """Agree on the version and the attempt. Nothing is touched before everyone is here."""

        def mine() -> Mapping[str, object]:
            return {
                "version": version,
                "attempt": secrets.token_hex(16),
                "attached": self._attached and all(line.intact for line in self._lines),
                "newest": max((engine.last_version() for engine in self.engines), default=0),
            }

        replies = cast("Sequence[Mapping[str, Any]]", self._group.gather("begin", mine, self._deadline()))
        asked = {reply["version"] for reply in replies}
        if len(asked) != 1:
            raise ConfigError(f"trainer ranks ask for different versions: {[reply['version'] for reply in replies]}")
        newest = max(reply["newest"] for reply in replies)
        if version is not None and version <= newest:
            raise ConfigError(f"version {version} is not newer than version {newest}, which an engine has served")
        attached = all(reply["attached"] for reply in replies)
        return newest + 1 if version is None else version, replies[0]["attempt"], attached

    def _attach(self) -> None:
        if self._ranks is not None:
            self._ranks.forget()
        self._unmap()
        self._detach()
        self._group.reset()
        agreement, device = self._agreement, self._producer.device
        if agreement.turns is not None and agreement.plan.turns:
            self._lines = open_turns(self.engines, agreement.turns, agreement.plan, self.config, self._group, device)
        else:
            self._lines = self._group.local(
                "attach",
                lambda: open_lines(
                    self.engines, agreement.choices, agreement.plan, self.config, self._group.call, device
                ),
                self._patience(),
            )
        self._attached = True

    def _unmap(self) -> None:
        """Workers let go of what they have mapped while it is still there. Never raises."""
        for line in self._lines:
            for engine in line.engines:
                with suppress(ReferenceError):  # held weakly, and gone
                    engine.close(line.sender.ticket().address)

    def _detach(self) -> None:
        self._attached = False
        for line in self._lines:
            line.sender.close()
        self._lines = []

    def _transfer(self, version: int, attempt: str, watch: Stopwatch) -> float:
        group, producer, cast_seconds = self._group, self._producer, 0.0
        with watch.stage("open"):
            if self._ranks is None:
                group.local("open", producer.open, self._patience())
            else:
                cast_seconds = self._ranks.open(self._patience(), meanwhile=self._pause_engines)
        if cast_seconds:
            watch.stages |= {"open": watch.stages["open"] - cast_seconds, "cast": cast_seconds}
        with watch.stage("pause"):
            group.reported("pause", lambda: self._start_engines(version, attempt, watch))
            if self._sent.buckets:  # else nobody needs to know before "load"
                group.round("pause", None, self._patience())
        error: BaseException | None = None
        for bucket in self._sent.buckets:
            error = self._send(bucket, error, watch)
        confirmed: list[object] = []
        if self._sent.buckets:
            with watch.stage("drain"):
                confirmed += group.gather("drain", lambda: self._drain(error), self._patience())
        results: list[Sequence[Loaded]] = []
        with watch.stage("load"):
            confirmed += group.gather("load", lambda: self._join(results), self._patience())
        if not all(confirmed):
            raise _OutdatedError("the trainer replaced parameters since the last sync")
        if self.config.verify == "digest":
            with watch.stage("digest"):
                self._compare_digests([[worker.digests for worker in workers] for workers in results])
        with watch.stage("finish"):
            self._doubtful = self._ranks is not None and group.world_size > 1
            group.local("finish", lambda: self._publish(version, attempt), self._patience())
            if self._doubtful:
                group.round("leave", None, self._patience())
            self._doubtful = False
            for engine in self.engines:
                engine.resume()
        self._pulled_nbytes = sum(worker.pulled_nbytes for workers in results for worker in workers)
        if self._ranks is not None and self.engines:
            watch.add_slowest({"read": engine.read_seconds} for engine in cast("Sequence[PullingEngine]", self.engines))
        watch.add_slowest(worker.seconds for workers in results for worker in workers)
        return self._paused.seconds if self.engines else 0.0

    def _pause_engines(self) -> None:
        self._paused, deadline = Stopwatch(), self._deadline()
        for engine in self.engines:
            engine.pause(self.config.pause, deadline)

    def _start_engines(self, version: int, attempt: str, watch: Stopwatch) -> None:
        if self._ranks is None:
            self._pause_engines()
        deadline = self._deadline()
        check_intact(self._lines)
        if self._ranks is not None:
            watch.stages["worker map"] = self._ranks.tell(self._lines, deadline)
        for engine in self.engines:
            engine.begin(version, attempt, deadline, digest=self.config.verify == "digest")
        if self._ranks is not None:  # where nothing travels, nothing else shows whose plan the workers began
            check_intact(self._lines)

    def _send(self, bucket: Bucket, error: BaseException | None, watch: Stopwatch) -> BaseException | None:
        """Move one bucket on every rank. Returns an error of the last, local step for the next go/stop to report."""
        producer = self._producer
        references = producer.references(bucket)
        lines = self._lines if bucket.sender in (None, self._group.rank) else []
        rings = [line.sender for line in lines if references is None or not line.by_reference]
        gather = bool(rings) or references is None
        slots: list[torch.Tensor] = []
        if error is None:
            try:
                with watch.stage("acquire"):
                    deadline = self._deadline()
                    slots = [ring.acquire(deadline) for ring in rings]
                if gather:
                    with watch.stage("stage"):
                        producer.stage(bucket, slots[0] if slots else None)
            except Exception as caught:
                error = caught
        with watch.stage("go/stop"):
            self._group.agree(f"bucket {bucket.index}", error, self._patience())
        try:
            if gather:
                with watch.stage("fill"):
                    producer.fill(bucket, slots[0] if slots else None)
                    for slot in slots[1:]:
                        slot[: bucket.nbytes].copy_(slots[0][: bucket.nbytes])
            for ring in rings:
                ring.commit(bucket)
            if references is not None:
                for line in self._lines:
                    if line.by_reference:
                        line.sender.hand_over(bucket, references)
        except Exception as caught:
            return caught
        return None

    def _drain(self, error: BaseException | None) -> bool:
        """Whether what was sent is what the trainer holds. Raises `error`, or what went wrong now.

        Asked while the last of it is copied; of what is pulled, only once that was read or queued to be: see `_join`.
        """
        if error is not None:
            raise error
        deadline = self._deadline()
        for line in self._lines:
            line.sender.drain(deadline)
        self._group.settle(deadline)
        return self._ranks is not None or self._producer.confirm()

    def _join(self, results: list[Sequence[Loaded]]) -> bool:
        """Add what each engine's workers say to `results`. Whether what was pulled is what the trainer holds."""
        deadline = self._deadline()
        results += [engine.join(deadline) for engine in self.engines]
        return self._ranks is None or self._producer.confirm()

    def _compare_digests(self, results: Sequence[Sequence[Mapping[str, int]]]) -> None:
        names = [spec.name for spec in self._agreement.plan.specs]
        shares = self._group.gather("digest", lambda: list(self._producer.digests(names)), self._patience())
        columns = zip(*cast("Sequence[Sequence[int]]", shares), strict=True)
        expected = {name: sum(column) % 2**64 for name, column in zip(names, columns, strict=True)}
        self._group.local("compare digests", lambda: self._check(expected, results), self._patience())

    def _check(self, expected: Mapping[str, int], results: Sequence[Sequence[Mapping[str, int]]]) -> None:
        for engine, workers in zip(self.engines, results, strict=True):
            check_digests(engine.name, expected, workers)

    def _publish(self, version: int, attempt: str) -> None:
        deadline = self._deadline()
        for engine in self.engines:
            engine.finish(version, attempt, deadline)

    def _give_up(self, attempt: str, error: BaseException) -> None:
        """Close the wires first, so that workers stop waiting; then see what each engine still holds. Never raises."""
        self._group.report("give up", error)
        attached = [(engine, line.sender.ticket().address) for line in self._lines for engine in line.engines]
        self._group.reset()  # first: what waits on a device for a dead rank would keep the wires
        self._detach()
        reason, deadline = f"{type(error).__name__}: {error}", self._deadline()
        doubtful, self._doubtful = self._doubtful, False
        for engine in self.engines:
            # The halves of one replica must not end in different states: they would wait for each other for ever.
            engine.abort(attempt, reason, deadline, tear=doubtful or engine.replica in self._agreement.spread)
        for engine, address in attached:
            with suppress(ReferenceError):
                engine.close(address)  # nothing of the trainer's stays mapped
        for engine in self.engines:
            with suppress(WsyncError, ReferenceError):  # torn, or gone: it stays paused
                engine.resume()

    def _patience(self) -> Deadline:
        """For rounds in the middle of a sync: a rank may first have waited for its engines."""
        return Deadline.beyond(self.config.timeout_s)

    def _report(self, version: int, watch: Stopwatch, pause_seconds: float) -> SyncReport:
        plan = self._agreement.plan
        held = sum(line.sender.held_bytes for line in self._lines)
        held += self._producer.staging_bytes + self._staging.held_bytes
        return SyncReport(
            version=version,
            nbytes=plan.nbytes,
            tensors=len(plan.specs),
            seconds=watch.seconds,
            pause_seconds=pause_seconds,
            control_seconds=watch.control_seconds,
            transport="+".join(dict.fromkeys(line.transport for line in self._lines)) or "none",
            stages=dict(watch.stages),
            peak_bytes=held,
            pulled_nbytes=self._pulled_nbytes,
            through_loader=max((len(m.through_loader) for m in self._agreement.manifests), default=0),
        )


class _OutdatedError(WsyncError):
    """What was sent is not what the trainer holds now. Raised on every rank alike."""
