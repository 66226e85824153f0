"""The memory manager with a real engine and a real trainer: phases change nothing but where the bytes are."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import wsync
from tests.engines.hf_models import FAMILIES, expected_tokens, same_bits, seeded
from wsync.adapters.engines.hf import HFEngine
from wsync.errors import ConfigError, EngineStateError, MemoryStateError

BATCH = torch.tensor([[3, 17, 42, 99, 5, 1, 2, 3]])


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(input_ids=BATCH, labels=BATCH).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def held(tensors: Iterable[Any]) -> int:
    """Bytes that `tensors` have now."""
    return sum(
        {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if torch.is_tensor(t)}.values()
    )


def states(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


@pytest.mark.parametrize("family", FAMILIES)
def test_three_rounds_are_those_of_a_trainer_without_a_manager(family: str) -> None:
    make = FAMILIES[family]
    actor, engine = seeded(make, 1), seeded(make, 2)
    alone = seeded(make, 1)
    adam, other = (torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (actor, alone))
    memory = wsync.MemoryManager(engine=engine, models={"actor": actor}, optimizers={"adam": adam})
    for turn in range(3):
        memory.enter("rollout")
        assert held(actor.parameters()) == held(states(adam)) == 0
        assert held(engine.parameters()) > 0
        engine.generate(torch.tensor([[3, 1]]), max_new_tokens=2)

        memory.enter("train")
        assert held(engine.parameters()) == 0
        step(actor, adam)
        step(alone, other)

        report = wsync.sync(actor, engine, memory=memory)
        assert report.version == turn + 1
        assert memory.phase == "rollout"
        assert held(actor.parameters()) == held(states(adam)) == 0
        assert expected_tokens(engine) == expected_tokens(alone)
    memory.enter("train")
    assert same_bits(actor, alone)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(states(adam), states(other), strict=True))
    peaks = memory.ledger.peaks()
    assert {phase: peaks[phase].entered for phase in ("rollout", "train", "sync")} == {
        "rollout": 4,
        "train": 4,
        "sync": 3,
    }
    memory.close()


def test_a_sync_that_fails_stays_in_its_phase_and_can_be_made_again() -> None:
    actor, engine = seeded(FAMILIES["llama"], 1), seeded(FAMILIES["llama"], 2)
    memory = wsync.MemoryManager(engine=engine, models={"actor": actor})
    memory.enter("train")
    head, actor.lm_head = actor.lm_head, torch.nn.Identity()
    with pytest.raises(wsync.MismatchError):
        wsync.sync(actor, engine, memory=memory)
    assert memory.phase == "sync"
    with pytest.raises(EngineStateError):
        engine.generate(torch.tensor([[3, 1]]), max_new_tokens=2)
    actor.lm_head = head
    wsync.sync(actor, engine, memory=memory)
    assert memory.phase == "rollout"
    memory.enter("train")
    assert same_bits(actor, seeded(FAMILIES["llama"], 1))


def test_frozen_models_come_for_a_block() -> None:
    actor, engine, reference = (seeded(FAMILIES["llama"], seed) for seed in (1, 2, 3))
    memory = wsync.MemoryManager(engine=engine, models={"actor": actor}, frozen={"reference": reference})
    memory.enter("rollout")
    assert held(reference.parameters()) == 0
    with memory.using("reference"):
        reference(input_ids=BATCH)
    assert held(reference.parameters()) == 0


def test_one_manager_an_engine() -> None:
    actor, engine = seeded(FAMILIES["llama"], 1), seeded(FAMILIES["llama"], 2)
    memory = wsync.MemoryManager(engine=engine, models={"actor": actor})
    with pytest.raises(ConfigError, match="has a memory manager already"):
        wsync.MemoryManager(engine=engine, models={"actor": actor})
    memory.enter("rollout")
    with pytest.raises(MemoryStateError, match="actor would be lost"):
        memory.close()
    memory.enter("train")
    memory.close()
    wsync.MemoryManager(engine=HFEngine(engine), models={"actor": actor}).close()


def test_an_engine_that_somebody_else_put_to_sleep() -> None:
    """Its owner may sleep and wake it by hand; the manager must not believe what it remembers."""
    actor, engine = seeded(FAMILIES["llama"], 1), seeded(FAMILIES["llama"], 2)
    memory = wsync.MemoryManager(engine=engine, models={"actor": actor})
    memory.enter("rollout")
    HFEngine(engine).sleep(2)
    memory.enter("train")
    wsync.sync(actor, engine, memory=memory)
    assert expected_tokens(engine) == expected_tokens(seeded(FAMILIES["llama"], 1))
