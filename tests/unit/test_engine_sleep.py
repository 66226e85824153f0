"""The rules of `WorkerEngine` about sleep: tags in order, nothing served without weights, syncs while half awake."""

import pytest

from tests.unit.fake_engine import FakeEngine, fail_update, soon
from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.errors import EngineStateError, SyncTimeout, UnsupportedError


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def test_no_update_while_asleep(engine: FakeEngine) -> None:
    engine.version()
    engine.sleep(2)
    for forbidden in (
        lambda: engine.begin(1, "a", soon(), digest=False),
        lambda: engine.describe([], soon()),
        lambda: engine.pause("wait", soon()),
    ):
        with pytest.raises(EngineStateError, match=r"asleep.*wake_up\(\['weights'\]\)"):
            forbidden()
    assert engine.calls == ["hello"]
    assert engine.hooks == ["sleep 2"]


def test_weights_wake_before_kv_cache(engine: FakeEngine) -> None:
    engine.sleep(1)
    with pytest.raises(EngineStateError, match="'weights' before 'kv_cache'"):
        engine.wake_up(["kv_cache"])
    with pytest.raises(EngineStateError, match="unknown sleep tags"):
        engine.wake_up(["cuda_graph"])
    engine.wake_up(["weights"])
    assert engine.reason is not None, "the cache is still asleep"
    engine.wake_up(["kv_cache"])
    engine.wake_up()
    assert engine.hooks == ["sleep 1", "wake weights", "wake kv_cache"]
    assert engine.reason is None


def test_waking_all_at_once_goes_in_order(engine: FakeEngine) -> None:
    engine.sleep(1)
    engine.wake_up()
    assert engine.hooks == ["sleep 1", "wake weights+kv_cache"]


def test_sleep_is_idempotent_but_never_half_done(engine: FakeEngine) -> None:
    with pytest.raises(EngineStateError, match="sleep level 3"):
        engine.sleep(3)
    engine.sleep(2)
    engine.sleep(2)
    assert engine.hooks == ["sleep 2"]
    engine.wake_up(["weights"])
    with pytest.raises(EngineStateError, match="half awake"):
        engine.sleep(2)


def test_a_sleep_that_fails_leaves_it_awake(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(level: int, deadline: Deadline) -> None:
        raise EngineStateError("2 unfinished requests")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "on_sleep", busy)
        with pytest.raises(EngineStateError, match="2 unfinished requests"):
            engine.sleep(2)
        assert engine.reason is None
        engine.pause("wait", soon())
        with pytest.raises(EngineStateError, match="2 unfinished requests"):
            engine.sleep(2)
    assert "paused" in str(engine.reason)
    engine.resume()
    engine.sleep(1)
    engine.wake_up()
    assert engine.hooks == ["pause wait", "resume", "sleep 1", "wake weights+kv_cache"]
    assert engine.reason is None, "it lost no weights"


def test_a_sleep_without_an_answer_counts(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def stalled(level: int, deadline: Deadline) -> None:
        raise SyncTimeout("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "on_sleep", stalled)
        with pytest.raises(SyncTimeout):
            engine.sleep(1)
    assert "asleep" in str(engine.reason)
    engine.wake_up()
    assert engine.reason is None


def test_a_wake_up_without_an_answer_leaves_it_asleep(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def stalled(tags: object, deadline: Deadline) -> None:
        raise SyncTimeout("no answer")

    engine.sleep(1)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "on_wake_up", stalled)
        with pytest.raises(SyncTimeout):
            engine.wake_up()
    assert "asleep" in str(engine.reason)
    engine.wake_up()
    assert engine.reason is None


def test_every_hook_has_a_deadline_that_of_the_last_sync_where_the_call_has_none(engine: FakeEngine) -> None:
    engine.sleep(1)
    engine.wake_up()
    assert engine.waits["sleep 1"] == engine.waits["wake weights+kv_cache"] == 120
    engine.pause("wait", soon())
    engine.begin(1, "a", soon(7), digest=False)
    engine.join(soon())
    engine.finish(1, "a", soon(3))
    engine.resume()
    engine.sleep(2)
    engine.wake_up()
    assert (engine.waits["reset"], engine.waits["resume"]) == (3, 7)
    assert (engine.waits["sleep 2"], engine.waits["wake weights+kv_cache"]) == (7, 7)


# The KV cache alone: the weights stay, and are synced meanwhile.


class CacheEngine(FakeEngine):
    """One that can."""

    def check_release_cache(self) -> None:
        pass

    def on_release_cache(self, deadline: Deadline) -> None:
        assert self.reason is not None, "memory goes away under an engine that still serves"
        self._hook("release cache", deadline)


def test_the_cache_sleeps_alone_through_a_sync() -> None:
    engine = CacheEngine()
    engine.pause("wait", soon())
    engine.sleep(tags=["kv_cache"])
    assert engine.asleep == {"kv_cache"}
    engine.sync(1)
    engine.resume()
    assert "asleep (kv_cache)" in str(engine.reason)
    engine.wake_up(["kv_cache"])
    assert engine.hooks == ["pause wait", "release cache", "reset", "wake kv_cache", "resume"]
    assert engine.reason is None
    assert engine.version() == 1


def test_without_a_sync_the_old_weights_serve_again() -> None:
    engine = CacheEngine()
    engine.sleep(2, ["kv_cache"])
    engine.sleep(2, ["kv_cache"])
    with pytest.raises(EngineStateError, match="half awake"):
        engine.sleep(1)
    engine.wake_up()
    assert engine.hooks == ["release cache", "wake kv_cache"]
    assert engine.reason is None, "level 2 is about weights, which stayed"


class FreezingEngine(FakeEngine):
    """Can freeze what is in flight."""

    def on_pause(self, mode: PauseMode, deadline: Deadline) -> None:
        assert self.reason is not None, "new work would be taken while the old is frozen"
        self.hooks.append(f"pause {mode}")


def test_level_0_keeps_all_memory_and_generates_nothing() -> None:
    engine = FreezingEngine()
    for _ in range(2):
        engine.sleep(0)
    assert engine.asleep == {"scheduling"}
    assert "asleep (scheduling); call wake_up" in str(engine.reason)
    engine.wake_up(["scheduling"])
    assert engine.hooks == ["pause keep", "resume"]
    assert (engine.asleep, engine.reason) == (set(), None)


def test_a_sync_at_level_0_does_not_wake_it() -> None:
    engine = FreezingEngine()
    engine.sleep(0)
    engine.pause("wait", soon())
    engine.sync(1)
    engine.resume()
    assert "asleep (scheduling)" in str(engine.reason)
    engine.wake_up()
    assert engine.hooks == ["pause keep", "pause wait", "reset", "resume"]
    assert engine.reason is None


def test_level_0_does_not_let_a_torn_engine_go_on() -> None:
    engine = FreezingEngine()
    engine.version()
    engine.pause("keep", soon())
    fail_update(engine)
    engine.abort("a", "it failed", soon(), tear=True)
    engine.sleep(0)
    engine.wake_up()
    assert "holds no consistent version" in str(engine.reason)
    assert engine.hooks == ["pause keep", "pause keep"]


def test_an_engine_that_was_paused_before_level_0_is_paused_after_it() -> None:
    engine = FreezingEngine()
    engine.pause("keep", soon())
    engine.sleep(0)
    engine.wake_up()
    assert "is paused for a sync; call resume" in str(engine.reason)
    engine.resume()
    assert engine.hooks == ["pause keep", "pause keep", "resume"]
    assert engine.reason is None


def test_level_0_without_an_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FreezingEngine()

    def stalled(mode: PauseMode, deadline: Deadline) -> None:
        raise SyncTimeout("gave up")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "on_pause", stalled)
        with pytest.raises(SyncTimeout):
            engine.sleep(0)
    assert "asleep (scheduling)" in str(engine.reason)
    engine.wake_up()
    assert engine.hooks == ["resume"]
    assert engine.reason is None


def test_levels_are_not_mixed() -> None:
    engine = FreezingEngine()
    with pytest.raises(EngineStateError, match="takes no tags"):
        engine.sleep(0, ["kv_cache"])
    engine.sleep(0)
    with pytest.raises(EngineStateError, match=r"half awake; wake_up \['scheduling'\]"):
        engine.sleep(2)
    engine.wake_up()
    engine.sleep(1)
    with pytest.raises(EngineStateError, match=r"sleeps already \(kv_cache, weights\) and cannot go to sleep level 0"):
        engine.sleep(0)


def test_level_0_needs_an_engine_that_can_freeze_requests(engine: FakeEngine) -> None:
    with pytest.raises(UnsupportedError, match="cannot freeze"):
        engine.sleep(0)
    assert (engine.asleep, engine.reason) == (set(), None)


def test_level_0_during_a_sync(engine: FakeEngine) -> None:
    engine.version()
    engine.begin(1, "a", soon(), digest=False)
    with pytest.raises(EngineStateError, match="is taking new weights and cannot go to sleep level 0"):
        engine.sleep(0)
    engine.join(soon())
    engine.finish(1, "a", soon())


def test_what_cannot_sleep_alone_is_refused_before_anything_changes(engine: FakeEngine) -> None:
    for call in (engine.check_sleep, lambda tags: engine.sleep(2, tags)):
        with pytest.raises(UnsupportedError, match="fake cannot release its KV cache and keep its weights"):
            call(["kv_cache"])
        with pytest.raises(EngineStateError, match="a KV cache without weights serves nothing"):
            call(["weights"])
        with pytest.raises(EngineStateError, match="unknown sleep tags"):
            call(["cuda_graph"])
    assert engine.hooks == []
    assert engine.asleep == set()
    assert engine.reason is None


# Void: slept at level 2.


def test_void_until_a_sync(engine: FakeEngine) -> None:
    engine.sleep(2)
    engine.wake_up()
    with pytest.raises(EngineStateError, match="no weights since its level-2 sleep"):
        engine.resume()
    assert engine.reason is not None
    engine.sync(1)
    engine.resume()
    assert engine.reason is None


def test_level_1_after_level_2_does_not_bring_weights_back(engine: FakeEngine) -> None:
    engine.sleep(2)
    engine.wake_up()
    engine.sleep(1)
    engine.wake_up()
    assert engine.reason is not None
    assert "level-2" in engine.reason


def test_an_abort_does_not_make_a_void_engine_serve(engine: FakeEngine) -> None:
    engine.sleep(2)
    engine.wake_up()
    fail_update(engine)
    engine.abort("a", "no room", soon())
    assert engine.reason is not None
    assert "level-2" in engine.reason


# The co-located order: the cache sleeps through the sync.


def test_resume_waits_for_the_cache(engine: FakeEngine) -> None:
    engine.sleep(2)
    engine.wake_up(["weights"])
    engine.pause("abort", soon())
    engine.sync(1)
    engine.resume()
    assert "resume" not in engine.hooks
    assert engine.reason is not None
    engine.wake_up(["kv_cache"])
    assert engine.hooks[-2:] == ["wake kv_cache", "resume"]
    assert engine.reason is None


def test_a_pause_forgets_the_resume_that_waited(engine: FakeEngine) -> None:
    engine.sleep(1)
    engine.wake_up(["weights"])
    engine.resume()
    engine.pause("wait", soon())
    engine.wake_up()
    assert "resume" not in engine.hooks


def test_waking_the_cache_in_the_middle_of_a_sync_does_not_make_it_serve(engine: FakeEngine) -> None:
    engine.sleep(2)
    engine.wake_up(["weights"])
    engine.begin(1, "a", soon(), digest=False)
    engine.wake_up(["kv_cache"])
    assert engine.reason is not None
    assert "taking version 1" in engine.reason
    engine.join(soon())
    engine.finish(1, "a", soon())
    assert engine.reason is None


class Looking(FakeEngine):
    """Notes when it looks whether its weights are there, which may be a call of the engine."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[str] = []

    def _require_weights(self, doing: str) -> None:
        self.looks.append(doing.partition(" ")[0])
        super()._require_weights(doing)


def test_a_sync_looks_once_whether_the_weights_are_there() -> None:
    engine = Looking()
    for version in (1, 2):
        engine.pause("wait", soon())
        engine.begin(version, "a", soon(), digest=False)
        engine.join(soon())
        engine.finish(version, "a", soon())
        engine.resume()
    assert engine.looks == ["be", "be"]
    engine.begin(3, "a", soon(), digest=False)
    engine.join(soon())
    engine.finish(3, "a", soon())
    assert engine.looks == ["be", "be", "take"]
    engine.pause("wait", soon())
    engine.sleep(1)
    with pytest.raises(EngineStateError, match="asleep and cannot take version 4"):
        engine.begin(4, "a", soon(), digest=False)
