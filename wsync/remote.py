"""The trainer's side of separate worlds: an engine that another process serves, anywhere."""

import threading
import time
import uuid
import weakref
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

from wsync.calls import Calls, deadline_args
from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.errors import ConfigError, EngineStateError, PeerError, SyncTimeout, WsyncError
from wsync.plan import Plan, TensorSpec
from wsync.protocols import Loaded, Manifest, Ticket
from wsync.served import ticket_for
from wsync.topology import Endpoint
from wsync.transports.dial import address_parts
from wsync.transports.listener import connect
from wsync.wire import MAX_FRAME_BYTES

_GRACE_S = 1.0
"""How much longer than the other side we wait, so that its own words come through."""

_RETRY_S = 0.1


class RemoteEngine:
    """One engine that `wsync.serve` made reachable. Meets `wsync.Engine`; pass it wherever an engine is taken.

    The parts of one replica (the ranks of vLLM's external_launcher) are one RemoteEngine with the address of each: they
    are called at the same time, and end in the same state or torn. Several replicas are a list of RemoteEngines. If the
    connection is lost, what was under way fails with `PeerError`, and the next sync connects again.

    Attributes:
        name: the engine's, with its address.
    """

    def __init__(self, *addresses: str, secret: bytes | str, timeout_s: float = 60.0) -> None:
        """Connect. An engine that does not listen yet is waited for.

        Args:
            addresses: "host:port" of the engine, or of each of its parts in the order of their ranks.
            secret: the one that it is served with.
            timeout_s: longest wait, in seconds, to connect, and for calls that come without a deadline of their own.

        Raises:
            ConfigError: no address, or one that is none; or the secret is short.
            PeerError: somebody listens there who refuses us or does not know the secret.
            SyncTimeout: nobody listened there in time.
        """
        if not addresses:
            raise ConfigError("RemoteEngine needs the address of an engine, as wsync.serve says it")
        for address in addresses:
            address_parts(address)
        self._addresses = addresses
        self._ticket = ticket_for(secret)
        self._timeout_s = timeout_s
        self._newest = 0
        self._counts: list[int] | None = None
        self._connecting = threading.Lock()
        self._parts: list[Calls | None] = [None] * len(addresses)
        weakref.finalize(self, _hang_up, self._parts)
        hello = self._wait_for_all(Deadline.after(timeout_s))
        self.name = f"{hello['name']} at {', '.join(addresses)}"
        self._replica = hello["replica"] if len(addresses) == 1 else uuid.uuid4().hex

    def disconnect(self) -> None:
        """Hang up. An attempt that is under way ends on the other side."""
        _hang_up(self._parts)

    def __enter__(self) -> "RemoteEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disconnect()

    # The Engine protocol.

    @property
    def replica(self) -> str:
        """See `wsync.Engine`."""
        return self._replica

    @property
    def attachment(self) -> str | None:
        """See `wsync.Engine`."""
        addresses = set(self._all("attachment"))
        return cast("str | None", addresses.pop()) if len(addresses) == 1 else None

    def endpoints(self) -> Sequence[Endpoint]:
        """See `wsync.Engine`."""
        by_part = cast("Sequence[Sequence[Endpoint]]", self._all("endpoints"))
        self._counts = [len(part) for part in by_part]
        return [endpoint for part in by_part for endpoint in part]

    def version(self) -> int:
        """See `wsync.Engine`."""
        versions = cast("Sequence[int]", self._all("version"))
        if len(set(versions)) > 1:
            raise EngineStateError(f"the parts of {self.name} hold different versions: {list(versions)}; sync it again")
        return versions[0]

    def last_version(self) -> int:
        """See `wsync.Engine`. Counts what was served before the engine was started again."""
        self._newest = max(self._newest, *cast("Sequence[int]", self._all("last_version")))
        return self._newest

    def describe(self, specs: Sequence[TensorSpec], deadline: Deadline) -> Sequence[Manifest]:
        """See `wsync.Engine`."""
        by_part = cast("Sequence[Sequence[Manifest]]", self._all("describe", deadline, specs=list(specs)))
        return [manifest for part in by_part for manifest in part]

    def attach(self, plan: Plan, tickets: Sequence[Ticket], first_index: int, deadline: Deadline) -> None:
        """See `wsync.Engine`."""
        if self._counts is None:
            self.endpoints()
        assert self._counts is not None
        first = [first_index + sum(self._counts[:part]) for part in range(len(self._counts))]
        message = {"plan": plan, "tickets": list(tickets)}
        self._each("attach", [{**message, "first_index": index} for index in first], deadline)

    def begin(self, version: int, attempt: str, deadline: Deadline, *, digest: bool) -> None:
        """See `wsync.Engine`."""
        self._all("begin", deadline, version=version, attempt=attempt, digest=digest)

    def join(self, deadline: Deadline) -> Sequence[Loaded]:
        """See `wsync.Engine`."""
        by_part = cast("Sequence[Sequence[Mapping[str, Any]]]", self._all("join", deadline, again=False))
        return [Loaded(**worker) for part in by_part for worker in part]

    def finish(self, version: int, attempt: str, deadline: Deadline) -> None:
        """See `wsync.Engine`."""
        self._newest = max(self._newest, version)  # whatever comes of it
        self._all("finish", deadline, again=False, version=version, attempt=attempt)

    def abort(self, attempt: str, reason: str, deadline: Deadline, *, tear: bool = False) -> None:
        """See `wsync.Engine`. A part that is gone has ended the attempt by itself, and makes the others torn."""
        args: Mapping[str, object] = {"attempt": attempt, "reason": reason}
        served = self._whoever("abort", {**args, "tear": tear}, deadline)
        if len(set(served)) > 1 or len(served) < len(self._parts):
            self._whoever("abort", {**args, "tear": len(self._parts) > 1}, deadline)

    def pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """See `wsync.Engine`."""
        try:
            uses = max(cast("Sequence[int]", self._all("shut", deadline)))
            self._all("pause", deadline, mode=mode, uses=uses)
        except BaseException:
            self._whoever("resume", {}, deadline)
            raise

    def resume(self) -> None:
        """See `wsync.Engine`."""
        self._all("resume", again=False)

    @property
    def asleep(self) -> Collection[str]:
        """See `wsync.Engine`. What is away in any part."""
        return {tag for part in cast("Sequence[Sequence[str]]", self._all("asleep")) for tag in part}

    def check_sleep(self, tags: Sequence[str] | None = None) -> None:
        """See `wsync.Engine`."""
        self._all("check_sleep", tags=None if tags is None else list(tags))

    def sleep(self, level: int = 2, tags: Sequence[str] | None = None) -> None:
        """See `wsync.Engine`."""
        self._all("sleep", level=level, tags=None if tags is None else list(tags))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See `wsync.Engine`."""
        self._all("wake_up", tags=None if tags is None else list(tags))

    def close(self, address: str | None = None) -> None:
        """See `wsync.Engine`."""
        self._whoever("close", {"address": address}, Deadline.after(self._timeout_s))

    # Shared by the above.

    def _all(self, op: str, deadline: Deadline | None = None, *, again: bool = True, **args: object) -> list[object]:
        return self._each(op, [args] * len(self._parts), deadline, again=again)

    def _each(
        self, op: str, args: Sequence[Mapping[str, object]], deadline: Deadline | None, *, again: bool = True
    ) -> list[object]:
        """Call all parts at the same time, with arguments for each. With `again` lost connections are made anew.

        Raises the first part's error, `PeerError` if one is gone, `SyncTimeout`.
        """
        if deadline is None:
            deadline = Deadline.after(self._timeout_s)
        self._timeout_s = deadline.timeout_s
        waiting_for = f"{self.name} to answer {op!r}"
        parts = [self._part(index, deadline, again=again) for index in range(len(self._parts))]
        travelling = deadline_args(deadline, waiting_for)
        futures = [part.ask(op, {**mine, **travelling}, deadline) for part, mine in zip(parts, args, strict=True)]
        done, rest = wait(futures, deadline.remaining(waiting_for) + _GRACE_S, FIRST_EXCEPTION)
        for future in futures:
            if future in done:
                _raise(future)
        if rest:
            raise SyncTimeout(f"gave up after {deadline.timeout_s:g} s: still waiting for {waiting_for}")
        return [future.result() for future in futures]

    def _whoever(self, op: str, args: Mapping[str, object], deadline: Deadline) -> list[object]:
        """Call the parts that are still connected; the answers of those that gave one. Never raises."""
        futures = []
        with suppress(WsyncError):
            travelling = deadline_args(deadline.restart(), op)
            for part in self._parts:
                if part is not None and not part.over:
                    with suppress(WsyncError):
                        futures.append(part.ask(op, {**args, **travelling}, deadline.restart()))
        done, _ = wait(futures, deadline.timeout_s + _GRACE_S)
        return [future.result() for future in futures if future in done and future.exception() is None]

    def _part(self, index: int, deadline: Deadline, *, again: bool) -> Calls:
        with self._connecting:
            part = self._parts[index]
            if part is not None and not part.over:
                return part
            if not again:
                raise PeerError(f"the connection to {self.name} was lost; sync again when the engine is back")
            self._connect(index, deadline)
            part = self._parts[index]
            assert part is not None
            return part

    def _connect(self, index: int, deadline: Deadline) -> Mapping[str, Any]:
        """Connect to one part and say who we are. Raises `PeerError` if nobody is there or it refuses."""
        address = self._addresses[index]
        link, _ = connect(self._ticket, 0, deadline, at=address, peer="the engine", max_bytes=MAX_FRAME_BYTES)
        calls = Calls(link)
        args = {"parts": len(self._parts), **deadline_args(deadline, f"the engine at {address} to answer")}
        hello = calls.ask("hello", args, deadline)
        done, _ = wait([hello], deadline.remaining(f"the engine at {address} to answer"))
        if not done:
            calls.close()
            raise SyncTimeout(f"gave up after {deadline.timeout_s:g} s: the engine at {address} does not answer")
        _raise(hello)
        self._parts[index], self._counts = calls, None
        return cast("Mapping[str, Any]", hello.result())

    def _wait_for_all(self, deadline: Deadline) -> Mapping[str, Any]:
        """Connect to every part for the first time, as soon as it listens."""
        hello: Mapping[str, Any] = {}
        for index in range(len(self._parts)):
            while self._parts[index] is None:
                try:
                    hello = self._connect(index, deadline)
                except PeerError as error:
                    if not isinstance(error.__cause__, ConnectionError):
                        raise
                    time.sleep(min(_RETRY_S, deadline.remaining(f"the engine ({error})")))
        return hello


def _hang_up(parts: Sequence[Calls | None]) -> None:
    for part in parts:
        if part is not None:
            part.close()


def _raise(future: "Future[object]") -> None:
    error = future.exception(0)
    if error is not None:
        raise error
