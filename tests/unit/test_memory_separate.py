"""Phases of an engine with devices of its own: paused and without KV cache in a sync, and nothing else moves."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch

import wsync
from tests.unit.fake_engine import FakeEngine
from wsync.deadline import Deadline
from wsync.errors import EngineStateError, UnsupportedError
from wsync.testing.fake_device import FakeDevice

WEIGHTS, KV = 15, 50


class Separate(FakeEngine):
    """An engine on a device that counts, which can release its cache alone, unless told otherwise."""

    def __init__(self, device: FakeDevice, *, can: bool = True) -> None:
        super().__init__()
        self.device, self.can = device, can
        device.take("weights", WEIGHTS, engine=True)
        device.take("kv_cache", KV, engine=True)

    def check_release_cache(self) -> None:
        if not self.can:
            super().check_release_cache()

    def on_release_cache(self, deadline: Deadline) -> None:
        self._hook("release kv_cache", deadline)
        self.device.give("kv_cache")

    def on_wake_up(self, tags: Sequence[str], deadline: Deadline) -> None:
        super().on_wake_up(tags, deadline)
        self.device.take("kv_cache", KV, engine=True)


def made(engine: Any, device: FakeDevice, **more: Any) -> wsync.MemoryManager:
    actor = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(actor.parameters())
    return wsync.MemoryManager(
        engine=engine, models={"actor": actor}, optimizers={"adamw": optimizer}, device=device, colocated=False, **more
    )


def test_pause_release_then_take_and_go_on() -> None:
    device = FakeDevice(100)
    engine = Separate(device)
    memory = made(engine, device)
    for turn in range(3):
        memory.enter("rollout")
        memory.enter("train")
        memory.enter("sync")
        assert (set(device.engines), engine.asleep) == ({"weights"}, {"kv_cache"})
        engine.sync(turn + 1)
        engine.resume()  # as a session does: it waits for the cache
        memory.enter("rollout")
        assert engine.reason is None
    one = ["pause wait", "release kv_cache", "reset", "wake kv_cache", "resume", "resume"]
    assert engine.hooks == one * 3
    assert memory.sizes["engine kv_cache"] == KV
    assert [(str(move.step), move.freed) for move in memory.ledger.moves()] == [
        ("release engine generation", 0),
        ("release engine kv_cache", KV),
        ("empty cache", 0),
        ("restore engine kv_cache", -KV),
        ("restore engine generation", 0),
    ] * 3


def test_explain_prints_the_order() -> None:
    device = FakeDevice(100)
    text = made(Separate(device), device).explain()
    for line in (
        "rollout: actor, adamw, engine kv_cache, engine generation",
        "sync: actor, adamw",
        "rollout -> sync: release engine generation, release engine kv_cache, empty cache",
        "sync -> rollout: restore engine kv_cache, restore engine generation",
        "rollout -> train: nothing",
    ):
        assert line in text.splitlines()


def test_without_a_sync_in_between_it_goes_on_as_before() -> None:
    device = FakeDevice(100)
    engine = Separate(device)
    memory = made(engine, device, pause="abort")
    memory.enter("sync")
    assert "asleep" in str(engine.reason)
    memory.enter("rollout")
    assert engine.hooks == ["pause abort", "release kv_cache", "wake kv_cache", "resume"]
    assert engine.reason is None


def test_an_engine_that_cannot_is_refused_before_it_is_paused() -> None:
    device = FakeDevice(100)
    engine = Separate(device, can=False)
    memory = made(engine, device)
    memory.enter("rollout")
    with pytest.raises(UnsupportedError, match="fake cannot release its KV cache and keep its weights"):
        memory.enter("sync")
    assert engine.hooks == []
    assert memory.phase == "rollout"


def test_a_pause_that_fails_and_a_cache_that_stays_leave_a_stated_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(100)
    engine = Separate(device)
    memory = made(engine, device)
    memory.enter("rollout")

    def busy(deadline: Deadline) -> None:
        raise EngineStateError("2 unfinished requests")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "on_release_cache", busy)
        with pytest.raises(EngineStateError, match="2 unfinished requests"):
            memory.enter("sync")
    assert memory.phase is None
    assert set(memory.present) == {"actor", "adamw", "engine kv_cache"}
    assert "paused" in str(engine.reason)
    memory.enter("rollout")
    assert engine.reason is None


def test_a_torn_engine_does_not_go_on_before_a_sync_has_healed_it() -> None:
    device = FakeDevice(100)
    engine = Separate(device)
    memory = made(engine, device)
    memory.enter("sync")
    engine.abort("none", "the other half failed", Deadline.after(5), tear=True)
    with pytest.raises(EngineStateError, match="refuses to serve: the other half failed"):
        memory.enter("rollout")
    assert set(memory.present) == {"actor", "adamw", "engine kv_cache"}
    memory.enter("sync")
    engine.sync(1)
    engine.resume()
    memory.enter("rollout")
    assert engine.reason is None


def test_a_real_engine_answers_with_the_new_weights() -> None:
    from tests.engines.hf_models import FAMILIES, expected_tokens, seeded

    actor, engine = seeded(FAMILIES["llama"], 1), seeded(FAMILIES["llama"], 2)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2)
    memory = wsync.MemoryManager(
        engine=engine, models={"actor": actor}, optimizers={"adamw": optimizer}, colocated=False
    )
    batch = torch.tensor([[3, 17, 42, 99, 5, 1, 2, 3]])
    seen: list[Collection[Any]] = []
    for turn in range(3):
        memory.enter("rollout")
        engine.generate(torch.tensor([[3, 1]]), max_new_tokens=2)
        memory.enter("train")
        actor(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert wsync.sync(actor, engine, memory=memory).version == turn + 1
        seen.append(expected_tokens(engine))
        assert seen[-1] == expected_tokens(actor)
    memory.enter("sync")
    with pytest.raises(EngineStateError):
        engine.generate(torch.tensor([[3, 1]]), max_new_tokens=2)
    memory.enter("rollout")
    assert expected_tokens(engine) == seen[-1]
    memory.close()
