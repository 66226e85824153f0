"""The engine's side of separate worlds: an engine of this process, driven by a trainer somewhere else.

    with wsync.serve(llm, "10.0.0.5:7000", secret=secret) as served:
        while work():
            with served.using():
                llm.generate(...)

Three threads of its own: one listens to trainers, one runs their calls in order, and one waits for a running update.
A trainer that is gone has its attempt ended here, before anybody else is answered.
"""

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from wsync import registry
from wsync.calls import words_of
from wsync.deadline import FOREVER_S, Deadline
from wsync.errors import ConfigError, EngineStateError, ProtocolError, TransportError, WsyncError
from wsync.gate import Gate
from wsync.protocols import Engine, Ticket
from wsync.transports.link import Link, address_of, ready, wait_any
from wsync.transports.listener import Listener, Welcome, listen_at
from wsync.wire import MAX_FRAME_BYTES

_log = logging.getLogger(__name__)
_FEWEST_SECRET_BYTES = 16
_PROTOCOL = 1
_END_S = 10.0
_DOOR_SHUT_S = 0.5
"""How long nobody new is let in when the system has no descriptor left: else the waiting ones would keep us busy."""


def ticket_for(secret: bytes | str) -> Ticket:
    """What both sides of a control channel derive from their shared secret. Raises `ConfigError` if it is short."""
    key = secret.encode() if isinstance(secret, str) else bytes(secret)
    if len(key) < _FEWEST_SECRET_BYTES:
        raise ConfigError(f"the secret has {len(key)} bytes; at least {_FEWEST_SECRET_BYTES} random ones are needed")
    return Ticket(transport="control", address="wsync engine", secret=key, generation=_PROTOCOL)


def serve(engine: object, address: str = "127.0.0.1:0", *, secret: bytes | str | None = None) -> "Served":
    """Make an engine of this process reachable for trainers that know the secret.

    Args:
        engine: as for `wsync.sync`: a `vllm.LLM`, a Hugging Face model, an object that meets `wsync.Engine`. Under
            vLLM's external_launcher every rank serves its own part, at an address of its own.
        address: "host:port" to listen at; port 0 takes a free one. The default is reached from this host only.
        secret: at least 16 bytes that the trainers know too; None: made up, see `Served.secret`.

    Returns:
        A context manager. Leave it, or `close` it, to stop.

    Raises:
        UnsupportedError: nothing here can control this engine.
        ConfigError: the address or the secret is not fit.
        TransportError: the address cannot be bound.
    """
    control = registry.engine_for(engine)
    ticket = ticket_for(secrets.token_hex(32) if secret is None else secret)
    sock = listen_at(address)
    listener = Listener(sock, ticket, None, max_bytes=MAX_FRAME_BYTES)
    return Served(engine, address_of(sock.getsockname()), _Server(control, listener), ticket.secret)


class Served:
    """An engine that trainers can reach.

    Attributes:
        address: "host:port", for `wsync.RemoteEngine`.
        secret: what trainers must know.
    """

    def __init__(self, engine: object, address: str, server: "_Server", secret: bytes) -> None:
        self.address = address
        self.secret = secret
        self._engine = engine  # an adapter may hold it weakly
        self._server = server

    def using(self) -> AbstractContextManager[None]:
        """Put every use of the engine in `with served.using():` if it is for one thread at a time, as `vllm.LLM` is.

        A sync waits for the block to end, at most as long as its deadline says; a block that begins during a sync waits
        until that is over. Ranks that serve parts of one replica must run the same blocks in the same order. Not to be
        nested.
        """
        return self._server.gate.using()

    def close(self) -> None:
        """Stop: trainers are cut off, an attempt that is under way ends as if its trainer had died. Never raises."""
        self._server.close()

    def __enter__(self) -> "Served":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True, kw_only=True, eq=False)
class _Client:
    """One trainer, and what it has begun here."""

    link: Link
    parts: int = 1
    attempt: str | None = None
    address: str | None = None
    patience_s: float = 60.0
    gone: bool = field(default=False)


class _Server:
    """Listens, runs calls, and puts the engine in order when a trainer is gone."""

    def __init__(self, engine: Engine, listener: Listener) -> None:
        self.gate = Gate()
        self._engine, self._listener = engine, listener
        self._clients: list[_Client] = []
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = False
        self._threads = [
            threading.Thread(target=target, name=f"wsync serve {target.__name__.strip('_')}", daemon=True)
            for target in (self._listen, self._work)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing = True
        self._listener.shutdown()
        for thread in self._threads:
            thread.join(_END_S)

    def _listen(self) -> None:
        try:
            while not self._closing:
                filenos = [fd for client in self._clients for fd in client.link.filenos()]
                wait_any([*self._listener.filenos(), *filenos], Deadline.after(FOREVER_S), "trainers")
                if self._closing:
                    break
                self._let_in()
                for client in list(self._clients):
                    self._hear(client)
        finally:
            for client in list(self._clients):
                self._lose(client)
            self._calls.put(None)
            self._listener.close()

    def _let_in(self) -> None:
        try:
            for _, link in self._listener.admit(Welcome()):
                self._clients.append(_Client(link=link))
        except TransportError as error:
            _log.warning("wsync.serve: %s; trainers that are connected go on, new ones must wait", error)
            ready([fd for client in self._clients for fd in client.link.filenos()], _DOOR_SHUT_S)

    def _hear(self, client: _Client) -> None:
        try:
            while (frame := client.link.receive()) is not None:
                match frame:
                    case ("ask", int(number), str(op), dict(args)):
                        self._take(client, number, op, args)
                    case _:
                        raise ProtocolError(f"unknown frame {str(frame[0])[:20]!r}")
        except WsyncError:
            self._lose(client)

    def _take(self, client: _Client, number: int, op: str, args: Mapping[str, Any]) -> None:
        call = partial(self._answer, client, number, op, args)
        if op == "join":  # it may take long, and what ends it must not wait behind it
            threading.Thread(target=call, name="wsync serve join", daemon=True).start()
            return
        if op in ("abort", "resume"):
            self.gate.cancel(client)
        self._calls.put(call)

    def _lose(self, client: _Client) -> None:
        client.gone = True
        self._clients.remove(client)
        client.link.shutdown()
        self.gate.cancel(client)
        self._calls.put(partial(self._settle, client))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _settle(self, client: _Client) -> None:
        """The trainer is gone: end its attempt, drop its wires, let the engine serve what it still can."""
        deadline = Deadline.after(client.patience_s)
        if client.attempt is not None:
            self._engine.abort(client.attempt, "the trainer is gone", deadline, tear=client.parts > 1)
        if client.address is not None:
            self._engine.close(client.address)
        if self.gate.holds(client):
            with suppress(WsyncError):
                self._engine.resume()
            self.gate.open(client)
        client.link.close()

    def _answer(self, client: _Client, number: int, op: str, args: Mapping[str, Any]) -> None:
        if client.gone:
            return
        answer: tuple[object, ...]
        try:
            answer = ("ok", number, self._run(client, op, args))
        except Exception as error:
            answer = ("error", number, *words_of(error))
        try:
            client.link.send(answer, Deadline.after(client.patience_s))
        except WsyncError:
            client.link.shutdown()  # and the listening thread hears of it

    def _run(self, client: _Client, op: str, args: Mapping[str, Any]) -> object:
        try:
            deadline = Deadline(float(args["timeout_s"]), time.monotonic() + float(args["left_s"]))
            act = _OPS[op]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"no call {str(op)[:40]!r} with {first_keys(args)}") from error
        client.patience_s = deadline.timeout_s
        free = op in _FREE or self.gate.holds(client)
        with nullcontext() if free else self._gated(client, deadline):
            return act(self, client, args, deadline)

    def _gated(self, client: _Client, deadline: Deadline) -> AbstractContextManager[None]:
        return _Held(self.gate, client, deadline)

    # The calls. Each takes the client, its arguments and a deadline.

    def _hello(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        client.parts = int(args["parts"])
        return {"name": self._engine.name, "replica": self._engine.replica}

    def _attachment(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        return self._engine.attachment

    def _endpoints(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        return list(self._engine.endpoints())

    def _version(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        return self._engine.version()

    def _last_version(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        return self._engine.last_version()

    def _describe(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        return list(self._engine.describe(args["specs"], deadline))

    def _attach(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        client.address = args["tickets"][0].address
        self._engine.attach(args["plan"], args["tickets"], args["first_index"], deadline)
        return None

    def _shut(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        return self.gate.shut(client)

    def _pause(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        try:
            self.gate.hold(client, args["uses"], deadline)
            self._engine.pause(args["mode"], deadline)
        except BaseException:
            self.gate.open(client)
            raise
        return None

    def _begin(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        client.attempt = args["attempt"]
        self._engine.begin(args["version"], args["attempt"], deadline, digest=args["digest"])
        return None

    def _join(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        said = self._engine.join(deadline)
        return [{"digests": dict(worker.digests), "seconds": dict(worker.seconds)} for worker in said]

    def _finish(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        self._engine.finish(args["version"], args["attempt"], deadline)
        return None

    def _abort(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        """Answers with the version that is served now, None if torn."""
        self._engine.abort(args["attempt"], args["reason"], deadline, tear=args["tear"])
        client.attempt = None
        try:
            return self._engine.version()
        except EngineStateError:
            return None

    def _resume(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        if not self.gate.holds(client):
            return None  # not paused by this trainer; by another one perhaps
        try:
            self._engine.resume()
            client.attempt = None
        finally:
            self.gate.open(client)
        return None

    def _asleep(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        return sorted(self._engine.asleep)

    def _check_sleep(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        self._engine.check_sleep(args["tags"])
        return None

    def _sleep(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        self._engine.sleep(args["level"], args["tags"])
        return None

    def _wake_up(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        self._engine.wake_up(args["tags"])
        return None

    def _close(self, client: _Client, args: Mapping[str, Any], deadline: Deadline) -> object:
        self._engine.close(args["address"])
        return None


_OPS: Mapping[str, Callable[[_Server, _Client, Mapping[str, Any], Deadline], object]] = {
    name: getattr(_Server, f"_{name}")
    for name in (
        *("hello", "attachment", "endpoints", "version", "last_version", "describe", "attach", "shut", "pause"),
        *("begin", "join", "finish", "abort", "resume", "asleep", "check_sleep", "sleep", "wake_up", "close"),
    )
}
_FREE = frozenset({"hello", "attachment", "shut", "pause", "join", "resume", "asleep", "check_sleep"})
"""Calls that do not touch a worker by themselves, or look after the gate."""


class _Held:
    """The gate for one call."""

    def __init__(self, gate: Gate, client: _Client, deadline: Deadline) -> None:
        self._gate, self._client, self._deadline = gate, client, deadline

    def __enter__(self) -> None:
        self._gate.shut(self._client)
        try:
            self._gate.hold(self._client, 0, self._deadline)
        except BaseException:
            self._gate.open(self._client)
            raise

    def __exit__(self, *_: object) -> None:
        self._gate.open(self._client)


def first_keys(args: Mapping[str, Any]) -> str:
    """The names in `args`, for messages."""
    return ", ".join(sorted(map(str, args))[:5]) or "no arguments"
