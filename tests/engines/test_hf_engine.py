"""The embedded engine with a model of this process: generate, pause, refuse, sleep, sync."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import wsync
from tests.engines.hf_models import FAMILIES, PROMPTS, expected_tokens, llama, same_bits, seeded
from tests.engines.hf_syncs import HandSync, soon
from wsync.adapters.engines.hf import HFEngine
from wsync.background import Background
from wsync.config import PauseMode
from wsync.errors import ConfigError, EngineStateError, PeerError, SyncTimeout, UnsupportedError
from wsync.protocols import Engine
from wsync.transports.inproc import InprocTransport

LONG = 1500


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def refusals(model: Any) -> list[Callable[[], object]]:
    """Every way to make `model` run."""
    tokens = torch.tensor([[1, 2, 3]])
    return [
        lambda: HFEngine(model).generate(PROMPTS, max_new_tokens=2),
        lambda: model.generate(tokens, max_new_tokens=2),
        lambda: model(tokens),
    ]


def assert_refuses(model: Any, words: str) -> None:
    for attempt in refusals(model):
        with pytest.raises(EngineStateError, match=words):
            attempt()


def assert_serves(model: Any) -> None:
    for attempt in refusals(model):
        attempt()


@contextmanager
def held_generation(
    model: nn.Module, engine: HFEngine, **options: Any
) -> Iterator[tuple[Background[Any], threading.Event]]:
    """A generation that has begun, and goes on when the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        begun.set()
        assert go_on.wait(60)

    hook = model.register_forward_pre_hook(hold)
    try:
        running = Background("a generation", lambda: engine.generate(PROMPTS, **options))
        assert begun.wait(60)
        yield running, go_on
    finally:
        go_on.set()
        hook.remove()


# Generate.


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers(family: str) -> None:
    model = seeded(FAMILIES[family], 1)
    assert HFEngine(model).generate(PROMPTS, max_new_tokens=12) == expected_tokens(model)


def test_a_tensor_of_prompts_and_options() -> None:
    model = seeded(llama, 1)
    engine = HFEngine(model)
    prompts = torch.tensor([[3, 17, 42], [9, 8, 7]])
    rows = engine.generate(prompts, max_new_tokens=8)
    assert rows == engine.generate(prompts.tolist(), max_new_tokens=8)
    stop = rows[0][4]
    first = rows[0].index(stop)
    [cut, _] = engine.generate(prompts, max_new_tokens=8, eos_token_id=[stop, 4])
    assert cut == rows[0][: first + 1]
    assert engine.generate(prompts, max_new_tokens=8, do_sample=True, top_k=1) == rows


@pytest.mark.parametrize("rows", [[[1], []], [1, 2]])
def test_prompts_that_are_none_are_refused(rows: Any) -> None:
    model = seeded(llama, 1)
    with pytest.raises((ConfigError, TypeError)):
        HFEngine(model).generate(rows, max_new_tokens=2)


def test_nothing_is_generated_for_no_prompts() -> None:
    model = seeded(llama, 1)
    assert HFEngine(model).generate([], max_new_tokens=2) == []


# One engine a model, as long as the model.


def test_what_it_takes() -> None:
    model = seeded(llama, 1)
    assert HFEngine.matches(model)
    assert not HFEngine.matches(nn.Linear(1, 1))
    assert not HFEngine.matches("model")
    assert isinstance(HFEngine(model), Engine)
    assert HFEngine(model).pid is None


def test_one_engine_a_model_and_no_longer_than_it() -> None:
    model = seeded(llama, 1)
    engine = HFEngine(model)
    assert HFEngine(model) is engine
    assert HFEngine(seeded(llama, 1)) is not engine
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(EngineStateError, match="no longer exists"):
        engine.generate(PROMPTS, max_new_tokens=1)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_is_not_guarded(clone: Callable[[Any], Any]) -> None:
    model = seeded(llama, 1)
    HFEngine(model).guard("torn")
    assert_refuses(model, "torn")
    assert_serves(clone(model))


def test_shutdown_leaves_a_model_of_this_process_alone() -> None:
    model = seeded(llama, 1)
    with HFEngine(model):
        pass
    assert_serves(model)


# Pause.


def test_pause_wait_lets_generations_end() -> None:
    model = seeded(llama, 1)
    engine = HFEngine(model)
    with held_generation(model, engine, max_new_tokens=4) as (running, go_on):
        with pytest.raises(SyncTimeout, match=r"1 generation\(s\) of hf to end"):
            engine.pause("wait", soon(0.05))
        with pytest.raises(EngineStateError, match=r"cannot take version 1: 1 generation.*pause it first"):
            engine.begin(1, "a", soon(), digest=False)
        with pytest.raises(EngineStateError, match=r"cannot sleep: .*pause it first"):
            engine.sleep()
        pausing = Background("pause", lambda: engine.pause("wait", soon()))
        go_on.set()
        pausing.result(soon())
        assert [len(row) for row in running.result(soon())] == [4, 4, 4]
    assert_refuses(model, "paused for a sync; call resume")
    engine.resume()
    assert engine.generate(PROMPTS, max_new_tokens=12) == expected_tokens(model)


def test_pause_abort_returns_what_there_is() -> None:
    model = seeded(llama, 1)
    model.generation_config.eos_token_id = None
    engine = HFEngine(model)
    with held_generation(model, engine, max_new_tokens=LONG) as (running, go_on):
        go_on.set()
        engine.pause("abort", soon())
        assert running.done
        rows = running.result(soon())
    assert all(0 < len(row) < LONG for row in rows)
    engine.resume()
    expected = expected_tokens(model)
    assert [row[:12] for row in rows] == [row[: len(got)] for row, got in zip(expected, rows, strict=True)]
    assert engine.generate(PROMPTS, max_new_tokens=12) == expected, "later generations are not cut"


def test_a_pause_that_gives_up_aborts_nothing_later() -> None:
    model = seeded(llama, 1)
    engine = HFEngine(model)
    with held_generation(model, engine, max_new_tokens=6) as (running, go_on):
        with pytest.raises(SyncTimeout):
            engine.pause("abort", soon(0.05))
        go_on.set()
        assert [len(row) for row in running.result(soon())] == [6, 6, 6]


def test_pause_keep_is_refused_before_anything_changes() -> None:
    model = seeded(llama, 1)
    engine = HFEngine(model)
    with pytest.raises(UnsupportedError, match="key-value cache was made by the old weights"):
        engine.pause("keep", soon())
    assert_serves(model)
    with pytest.raises(UnsupportedError, match='pause with "wait" or "abort"'):
        wsync.sync(seeded(llama, 2), model, config=wsync.SyncConfig(pause="keep"))
    assert_serves(model)
    assert engine.version() == 0


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_generations_that_fail_do_not_block_a_pause(mode: PauseMode) -> None:
    model = seeded(llama, 1)
    engine = HFEngine(model)
    with pytest.raises(ValueError, match="no_such_option"):
        engine.generate(PROMPTS, max_new_tokens=2, no_such_option=1)
    engine.pause(mode, soon(5))


# Sync.


@pytest.mark.parametrize("family", FAMILIES)
def test_three_syncs_give_the_trainers_weights_and_tokens(family: str) -> None:
    actor, model = seeded(FAMILIES[family], 1), seeded(FAMILIES[family], 2)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    with wsync.connect(actor, model, config=wsync.SyncConfig(bucket_bytes=1 << 14)) as session:
        for version in (1, 2, 3):
            assert not same_bits(actor, model)
            session.sync()
            assert same_bits(actor, model)
            assert HFEngine(model).version() == version
            assert HFEngine(model).generate(PROMPTS, max_new_tokens=12) == expected_tokens(actor)
            with torch.no_grad():
                for parameter in actor.parameters():
                    parameter.mul_(1.5)
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]


def test_it_refuses_while_updating_and_serves_after() -> None:
    actor, model = seeded(llama, 1), seeded(llama, 2)
    engine = HFEngine(model)
    attempt = HandSync(engine, actor, InprocTransport())
    engine.pause("wait", soon())
    engine.begin(1, "a", soon(), digest=False)
    assert_refuses(model, "taking version 1")
    attempt.commit()
    engine.join(soon())
    assert_refuses(model, "taking version 1")
    engine.finish(1, "a", soon())
    engine.resume()
    assert_serves(model)
    assert same_bits(actor, model)


def test_a_sync_that_breaks_in_the_middle_tears_and_the_next_one_heals() -> None:
    actor, model = seeded(llama, 1), seeded(llama, 2)
    engine = HFEngine(model)
    attempt = HandSync(engine, actor, InprocTransport())
    engine.begin(1, "a", soon(), digest=False)
    attempt.commit(2)
    attempt.sender.close()
    with pytest.raises(PeerError, match="sender closed"):
        engine.join(soon())
    engine.abort("a", "the trainer died", soon())
    assert not same_bits(seeded(llama, 2), model), "something had been written"
    assert_refuses(model, "no consistent version.*the trainer died")
    for refused in (engine.version, HFEngine(model).resume):
        with pytest.raises(EngineStateError, match="Sync it again"):
            refused()
    report = wsync.sync(actor, model)
    assert (report.version, engine.version()) == (1, 1)
    assert_serves(model)
    assert same_bits(actor, model)


def test_a_sync_that_breaks_before_the_first_byte_changes_nothing() -> None:
    model = seeded(llama, 2)
    engine = HFEngine(model)
    attempt = HandSync(engine, seeded(llama, 1), InprocTransport())
    engine.version()
    engine.begin(1, "a", soon(), digest=False)
    attempt.sender.close()
    with pytest.raises(PeerError):
        engine.join(soon())
    engine.abort("a", "the trainer died", soon())
    assert engine.version() == 0
    assert_serves(model)
    assert same_bits(seeded(llama, 2), model)


# Sleep.


@pytest.mark.parametrize("family", FAMILIES)
def test_level_2_frees_every_storage_and_keeps_objects_and_buffers(family: str) -> None:
    actor, model = seeded(FAMILIES[family], 1), seeded(FAMILIES[family], 2)
    objects = [*model.parameters(), *model.buffers()]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert buffers
    engine = HFEngine(model)
    engine.sleep(2)
    assert {tensor.untyped_storage().nbytes() for tensor in objects} == {0}
    assert_refuses(model, "asleep")
    with pytest.raises(EngineStateError, match="asleep"):
        wsync.connect(actor, model)
    engine.wake_up()
    assert all(a is b for a, b in zip(objects, [*model.parameters(), *model.buffers()], strict=True))
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert_refuses(model, "no weights since its level-2 sleep")
    wsync.sync(actor, model)
    assert same_bits(actor, model)
    assert engine.generate(PROMPTS, max_new_tokens=12) == expected_tokens(actor)


@pytest.mark.parametrize("family", FAMILIES)
def test_level_1_brings_everything_back(family: str) -> None:
    model, untouched = seeded(FAMILIES[family], 1), seeded(FAMILIES[family], 1)
    engine = HFEngine(model)
    for _ in range(2):
        engine.sleep(1)
        assert {parameter.untyped_storage().nbytes() for parameter in model.parameters()} == {0}
        engine.wake_up()
        assert same_bits(model, untouched)
    assert_serves(model)


def test_a_session_goes_on_over_a_sleep() -> None:
    """The co-located order: addresses may change while asleep, and the cache wakes last."""
    actor, model = seeded(llama, 1), seeded(llama, 2)
    engine = HFEngine(model)
    with wsync.connect(actor, model) as session:
        session.sync()
        engine.sleep(2)
        with pytest.raises(EngineStateError, match="asleep"):
            session.sync()
        engine.wake_up(["weights"])
        session.sync()
        assert_refuses(model, "asleep")
        engine.wake_up(["kv_cache"])
        assert same_bits(actor, model)
        assert engine.generate(PROMPTS, max_new_tokens=12) == expected_tokens(actor)
