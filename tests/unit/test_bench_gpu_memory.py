"""The memory cases of the GPU suite as far as they go without a GPU: what they read from a ledger, and the loop."""

from dataclasses import replace

import pytest
import torch

import wsync
from wsync.bench.gpu import engines, memory_case, models
from wsync.bench.gpu.outcome import Outcome
from wsync.bench.gpu.stays import Stay, growth, stays_of
from wsync.memory.device import Room, Usage
from wsync.memory.ledger import Ledger

GIB = 1 << 30
CONTEXT, ENGINE = 1, 100
"""Of a process, and of an engine in it, in GiB."""


class Device:
    """140 GiB, with an engine of which the allocator never hears that it has unmapped its memory."""

    name = "fake"

    def __init__(self) -> None:
        self.asleep = False
        self.tensors = self.cached = self.peak = 0

    def describe(self) -> str:
        return self.name

    def room(self) -> Room:
        return self.usage()

    def usage(self) -> Usage:
        there = CONTEXT + (0 if self.asleep else ENGINE) + self.tensors + self.cached
        return Usage(
            total=140 * GIB,
            free=(140 - there) * GIB,
            allocated=(ENGINE + self.tensors) * GIB,
            reserved=(ENGINE + self.tensors + self.cached) * GIB,
            peak_allocated=(ENGINE + max(self.peak, self.tensors)) * GIB,
            peak_reserved=(ENGINE + self.tensors + self.cached) * GIB,
            by_this_process=None,
            by_others=None,
            host_rss=0,
            host_pinned=0,
        )

    def reset_peak(self) -> None:
        self.peak = self.tensors

    def empty_cache(self) -> None:
        self.cached = 0


def in_phase(device: Device, ledger: Ledger, phase: str, *, asleep: bool, tensors: int, peak: int) -> None:
    """What the manager records: the way, entering, leaving. `peak` is that of tensors in between."""
    ledger.record(f"to {phase}", "began", {})
    device.asleep, device.tensors, device.cached = asleep, tensors, 0
    for event in ("entered", "left"):
        ledger.record(phase, event, {})
        device.reset_peak()
        device.peak, device.cached = peak, peak - tensors


def test_a_stay_is_what_the_device_had_whatever_the_allocator_believes() -> None:
    device = Device()
    ledger = Ledger(device)
    for more in (0, 0, 1):
        in_phase(device, ledger, "rollout", asleep=False, tensors=0, peak=3)
        in_phase(device, ledger, "train", asleep=True, tensors=60 + more, peak=75)
    ledger.record("rollout", "entered", {})
    found = stays_of(ledger.entries())
    rollout = Stay(entered=101 * GIB, peak=104 * GIB, peak_cached=104 * GIB)
    assert found["rollout"] == [rollout] * 3
    train = Stay(entered=61 * GIB, peak=76 * GIB, peak_cached=76 * GIB)
    assert found["train"] == [train, train, replace(train, entered=62 * GIB)]
    assert set(found) == {"rollout", "train"}
    assert (growth(found["rollout"]), growth(found["train"])) == (0, GIB)


def test_what_an_engines_pools_keep_is_no_cache_of_the_trainers() -> None:
    """Of 100 GiB that the allocator counts as reserved, 5 were never in a tensor."""
    device = Device()
    ledger = Ledger(device)
    in_phase(device, ledger, "train", asleep=True, tensors=60, peak=75)
    shrunk = [
        replace(entry, usage=replace(entry.usage, allocated=entry.usage.allocated - 5 * GIB))
        for entry in ledger.entries()
    ]
    shrunk = [
        replace(entry, usage=replace(entry.usage, peak_allocated=entry.usage.peak_allocated - 5 * GIB))
        for entry in shrunk
    ]
    assert stays_of(shrunk)["train"][0].peak == 71 * GIB
    assert stays_of(shrunk, 5 * GIB)["train"][0].peak == 76 * GIB
    assert stays_of(shrunk, 5 * GIB)["train"][0].peak_cached == 76 * GIB


def test_the_prediction_for_this_run_by_hand() -> None:
    config = models.config_of(models.DENSE, torch.bfloat16)
    weights, context, cache = 2 * 7_615_616_512, 614 << 20, 90 * GIB
    found = memory_case.predicted(config, cache, 140 * GIB)
    assert set(found) == {"rollout", "sync", "train"}
    assert found["sync"] == context + 2 * weights
    assert found["rollout"] - (context + weights + cache) == pytest.approx(3 * GIB, rel=0.05)
    assert found["train"] - (context + 4 * weights) == pytest.approx(3.4 * GIB, rel=0.05)
    assert 5 * weights + cache > 140 * GIB > found["rollout"] + weights


def test_the_loop_with_an_engine_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers generates in place of vLLM; five iterations, and what is told of them."""
    monkeypatch.setattr(memory_case, "_SEQUENCE", 16)
    monkeypatch.setattr(engines, "answers_of", lambda engine: models.greedy(engine, engines.prompts(), 2))
    config = models.config_of(models.DENSE, torch.bfloat16, small=True)
    engine = models.make_actor(config, torch.bfloat16, 5, "cpu")
    trainer = memory_case.Trainer(config, "cpu")
    memory = wsync.MemoryManager(
        engine=engine, models={"actor": trainer.actor}, optimizers={"adamw": trainer.optimizer}
    )
    outcome = Outcome(case="vllm-memory")
    memory_case._told(outcome, memory, lambda: memory_case._iterate(outcome, memory, engine, trainer))
    assert outcome.ok, outcome
    stays = stays_of(memory.ledger.entries())
    assert {phase: len(some) for phase, some in stays.items()} == {"rollout": 6, "train": 5, "sync": 5}
    memory_case._check_stays(outcome, stays, {})
    memory_case._check_room(outcome, memory, trainer, 0)
    in_turn = len(memory.ledger.moves())
    memory_case._move_actor(memory)
    memory_case._check_speed(outcome, memory, in_turn, (1.0, 1.0))
    actor = sum(parameter.numel() for parameter in trainer.actor.parameters()) * 2
    sizes = outcome.facts["bytes by part"]
    assert isinstance(sizes, dict)
    assert (sizes["gradients"], sizes["actor"] >= actor, sizes["adamw"] >= 2 * actor) == (actor, True, True)
    assert outcome.checks["restore actor at 80% of a pinned copy"]
    assert {"release actor at 80% of a pinned copy", "all parts together would not fit"} <= outcome.checks.keys()
    alone, turn = outcome.facts["restore actor, GB/s"], outcome.facts["restore actor in turn, seconds"]
    assert isinstance(alone, dict)
    assert isinstance(turn, list)
    assert len(alone["seconds"]) == len(turn) == 5


def test_a_run_that_breaks_off_tells_what_was_seen_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    config = models.config_of(models.DENSE, torch.bfloat16, small=True)
    memory = wsync.MemoryManager(models={"actor": models.make_actor(config, torch.bfloat16, 1, "cpu")})
    outcome = Outcome(case="vllm-memory")

    def broken() -> None:
        memory.enter("train")
        raise RuntimeError("no room")

    memory_case._told(outcome, memory, broken)
    memory_case._check_stays(outcome, stays_of(memory.ledger.entries()), {})
    assert not outcome.ok
    assert outcome.checks["ran to the end"] is False
    assert any("no room" in str(fact) for fact in outcome.facts.values())
    assert "train" in str(outcome.facts["ledger"])
