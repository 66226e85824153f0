"""`sync`, `sync_async` and `connect`: from objects that a user has to a session."""

import asyncio
import os
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from wsync import registry
from wsync.background import Background
from wsync.config import SyncConfig
from wsync.deadline import Deadline
from wsync.device_work import order_after, queued
from wsync.errors import ConfigError, MismatchError, PeerError
from wsync.group import Group
from wsync.meeting import meeting
from wsync.memory.manager import MemoryManager
from wsync.protocols import Engine, Producer
from wsync.report import SyncReport
from wsync.session import Session
from wsync.trainer_ranks import trainer_ranks

_sessions: dict[tuple[Hashable, ...], Session] = {}
_watched: set[tuple[Hashable, ...]] = set()
"""Keys of `_sessions` whose objects already have a finalizer."""


def sync(
    actor: object,
    engine: object,
    *,
    config: SyncConfig | None = None,
    version: int | None = None,
    memory: MemoryManager | None = None,
) -> SyncReport:
    """Bring `engine` to the present weights of `actor`. Every trainer rank calls it.

    The first call connects the pair; later ones reuse the session, until the actor or the engine is garbage
    collected or another `config` is passed.

    Args:
        actor: a module (plain, DDP, FSDP1, FSDP2, with LoRA adapters), a DeepSpeed engine, the folder of a safetensors
            checkpoint, or an object that meets `wsync.Producer`.
        engine: a `vllm.LLM` or `AsyncLLM`, an `sglang.Engine`, a Hugging Face model, an object that meets
            `wsync.Engine`, a list of these, or None on ranks that own no engine.
        config: settings, the same on every rank; default `SyncConfig()`.
        version: number that the engine serves afterwards; default: one more than before.
        memory: the manager of the devices that both share. It enters "sync" before, so that the actor and the engine's
            weights are there and nothing else, and "rollout" afterwards; slots are let go in between. If the sync
            fails it stays in "sync".

    Raises:
        ConfigError: called on a running event loop (use `sync_async`), or no rank passed an engine.
        WsyncError: see `Session.sync` and `connect`.
    """
    if _on_event_loop():
        raise ConfigError("wsync.sync would block the running event loop; await wsync.sync_async(...) instead")
    return _sync(actor, engine, _settings(config), version, memory)


async def sync_async(
    actor: object,
    engine: object,
    *,
    config: SyncConfig | None = None,
    version: int | None = None,
    memory: MemoryManager | None = None,
) -> SyncReport:
    """`sync` for event loops: runs on a thread, the loop goes on. Do not touch the actor's weights until it returns.

    What the caller has queued on its current stream of its current CUDA device comes before.
    """
    settings = _settings(config)
    before = queued(_used_devices())

    def behind() -> SyncReport:
        order_after(before)  # a thread has streams of its own
        return _sync(actor, engine, settings, version, memory)

    return await asyncio.to_thread(behind)


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
            all three or none. `store` is any torch store that all ranks reach; they also reach rank 0, at the address
            that it has on the way to the store (with a store in files: all of them on one host). Pass the same object
            each time: a rank that missed a call meets the others in their next one over it.

    Raises:
        UnsupportedError: no adapter or no transport fits; the message lists what was seen and what is supported.
        MismatchError: names, shapes, dtypes or coverage do not fit; the message names the first five.
        ConfigError, RankError, SyncTimeout, EngineStateError, PeerError: see `wsync.errors`.
    """
    settings = _settings(config)
    rank, world_size, store = trainer_ranks(rank, world_size, store)
    before = meeting("connect", rank, world_size, store, settings.timeout_s)
    number, _ = before.come(None, Deadline.after(settings.timeout_s))
    return _connect(actor, engine, settings, before.group(number, store, settings.timeout_s))


def _connect(actor: object, engine: object, config: SyncConfig, group: Group) -> Session:
    try:
        producer = registry.producer_for(actor, config.lora)
        if any(one is actor for one in registry.as_list(engine)):
            raise ConfigError("actor and engine are the same object: there is nothing to sync")
        engines = [registry.engine_for(one) for one in registry.as_list(engine)]
        if len({id(one) for one in engines}) != len(engines):
            raise ConfigError("the same engine was passed twice")
        transports = registry.transports_for(config.transport)
    except Exception as error:
        group.report("connect", error)
        raise
    return Session(producer, engines, transports, group, config)


def _sync(
    actor: object, engine: object, config: SyncConfig, version: int | None, memory: MemoryManager | None
) -> SyncReport:
    if memory is not None:
        memory.enter("sync")
    key, session = _session_of(actor, engine, config)
    try:
        if memory is not None:
            memory.enter("sync", {"slots": session.slot_bytes})
        report = session.sync(version)
    except (MismatchError, PeerError):  # one side is perhaps no longer what it was at connect
        _drop(key)
        raise
    if memory is not None:
        session.release_slots()
        memory.enter("rollout")
    return report


def _settings(config: SyncConfig | None) -> SyncConfig:
    if config is not None and not isinstance(config, SyncConfig):
        raise ConfigError(f"config is a {type(config).__name__}; pass a wsync.SyncConfig")
    return config or SyncConfig()


def _used_devices() -> list[torch.device]:
    """The current CUDA device, if this process uses any."""
    initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.device("cuda", torch.cuda.current_device())] if initialised else []


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _session_of(actor: object, engine: object, config: SyncConfig) -> tuple[tuple[Hashable, ...], Session]:
    """The session that every rank has for this call; if one of them has none, or another one, all connect anew."""
    engines = registry.as_list(engine)
    key = (_key(actor), *(_key(one) for one in engines))
    found = _sessions.get(key)
    known = found if found is not None and found.config == config and not found.closed else None
    rank, world_size, store = trainer_ranks(None, None, None)
    before = meeting("sync", rank, world_size, store, config.timeout_s)
    number, tokens = before.come(known.token if known is not None else "", Deadline.after(config.timeout_s))
    if known is not None and set(tokens) == {known.token}:
        return key, known
    _drop(key)
    group = before.group(number, store, config.timeout_s)
    session = _connect(_weakly(actor, Producer), [_weakly(one, Engine) for one in engines], config, group)
    _sessions[key] = session
    if key not in _watched:
        _watched.add(key)
        for one in (actor, *engines):
            if not _is_address(one):
                weakref.finalize(one, _forget, key).atexit = False
    return key, session


def _key(one: object) -> Hashable:
    return os.fspath(one) if isinstance(one, (str, os.PathLike)) else id(one)


def _is_address(one: object) -> bool:
    """Whether `one` only says where something is: a path. Equal ones are the same, and nobody owns them."""
    return isinstance(one, (str, os.PathLike))


def _drop(key: tuple[Hashable, ...]) -> None:
    session = _sessions.pop(key, None)
    if session is not None:
        session.close()


def _forget(key: tuple[Hashable, ...]) -> None:
    """An actor or engine is gone. Closing may wait for a worker, which whoever collects garbage must not."""
    _watched.discard(key)
    session = _sessions.pop(key, None)
    if session is not None:
        Background("a session to close", session.close)


def _weakly(one: object, contract: type) -> Any:
    """An object that a session would hold as it is, held weakly, so that its owner decides how long it lives."""
    return weakref.proxy(one) if isinstance(one, contract) else one
