"""`sync`, `sync_async` and `connect`: from objects that a user has to a session."""

import asyncio
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from wsync import registry
from wsync.config import SyncConfig
from wsync.errors import ConfigError
from wsync.group import Group
from wsync.protocols import Engine, Producer
from wsync.report import SyncReport
from wsync.session import Session

_sessions: dict[tuple[int, ...], Session] = {}
_session_numbers = itertools.count()


def sync(actor: object, engine: object, *, config: SyncConfig | None = None, version: int | None = None) -> SyncReport:
    """Bring `engine` to the present weights of `actor`. Every trainer rank calls it.

    The first call connects the pair; later ones reuse the session, until the actor or the engine is garbage
    collected or another `config` is passed.

    Args:
        actor: a module (plain, DDP, FSDP2), or an object that meets `wsync.Producer`.
        engine: a `vllm.LLM`, a Hugging Face model, an object that meets `wsync.Engine`, a list of these, or None on
            ranks that own no engine.
        config: settings, the same on every rank; default `SyncConfig()`.
        version: number that the engine serves afterwards; default: one more than before.

    Raises:
        ConfigError: called on a running event loop (use `sync_async`), or no rank passed an engine.
        WsyncError: see `Session.sync` and `connect`.
    """
    if _on_event_loop():
        raise ConfigError("wsync.sync would block the running event loop; await wsync.sync_async(...) instead")
    return _session_of(actor, engine, config or SyncConfig()).sync(version)


async def sync_async(
    actor: object, engine: object, *, config: SyncConfig | None = None, version: int | None = None
) -> SyncReport:
    """`sync` for event loops: runs on a thread, the loop goes on. Do not touch the actor's weights until it returns."""
    settings = config or SyncConfig()
    return await asyncio.to_thread(lambda: _session_of(actor, engine, settings).sync(version))


def connect(
    actor: object,
    engine: object,
    *,
    config: SyncConfig | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    store: Store | None = None,
) -> Session:
    """Connect an actor with one or more engines. Every trainer rank calls it; no weight is moved.

    Args:
        actor, engine, config: as for `sync`.
        rank, world_size, store: the trainer's ranks, if torch.distributed is not initialised or should not be used;
            all three or none. `store` is any torch store that all ranks reach.

    Raises:
        UnsupportedError: no adapter or no transport fits; the message lists what was seen and what is supported.
        MismatchError: names, shapes, dtypes or coverage do not fit; the message names the first five.
        ConfigError, RankError, SyncTimeout, EngineStateError, PeerError: see `wsync.errors`.
    """
    settings = config or SyncConfig()
    group = _group(rank, world_size, store, settings.timeout_s)
    try:
        producer = registry.producer_for(actor)
        engines = [registry.engine_for(one) for one in _as_list(engine)]
        transports = registry.transports_for(settings.transport)
    except Exception as error:
        group.report("connect", error)
        raise
    return Session(producer, engines, transports, group, settings)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _session_of(actor: object, engine: object, config: SyncConfig) -> Session:
    engines = _as_list(engine)
    key = (id(actor), *(id(one) for one in engines))
    session = _sessions.get(key)
    if session is None or session.config != config:
        if session is not None:
            _sessions.pop(key).close()
        session = connect(_weakly(actor, Producer), [_weakly(one, Engine) for one in engines], config=config)
        _sessions[key] = session
        for one in (actor, *engines):
            weakref.finalize(one, _drop, key, session)
    return session


def _drop(key: tuple[int, ...], session: Session) -> None:
    if _sessions.get(key) is session:
        del _sessions[key]
    session.close()


def _weakly(one: object, contract: type) -> Any:
    """An object that a session would hold as it is, held weakly, so that its owner decides how long it lives."""
    return weakref.proxy(one) if isinstance(one, contract) else one


def _as_list(engine: object) -> Sequence[object]:
    if engine is None:
        return []
    return list(engine) if isinstance(engine, (list, tuple)) else [engine]


def _group(rank: int | None, world_size: int | None, store: Store | None, timeout_s: float) -> Group:
    if (rank is None) != (world_size is None):
        raise ConfigError("connect takes rank and world_size together, and a store with them if world_size > 1")
    if rank is None or world_size is None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return Group(0, 1, None, timeout_s)
        rank, world_size, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not in a world of {world_size}")
    if world_size > 1:
        if store is None:
            raise ConfigError(f"a session of {world_size} trainer ranks needs store=, which all of them reach")
        shared: Any = PrefixStore(f"wsync/{next(_session_numbers)}", store)
        store = shared.clone()  # a connection of our own: a wait of ours must not block the trainer's
    return Group(rank, world_size, store, timeout_s)
