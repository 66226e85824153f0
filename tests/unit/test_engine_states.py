"""The rules of `WorkerEngine` about attempts: what may be called when, and what is left after a failure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.unit.fake_engine import ERROR, FakeEngine, fail_update, soon, updates
from wsync import wire
from wsync.deadline import Deadline
from wsync.errors import EngineStateError, PeerError, ProtocolError, SyncTimeout, UnsupportedError
from wsync.plan import Plan
from wsync.protocols import Ticket

TICKET = Ticket(transport="inproc", address="one", secret=b"", generation=1)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def test_a_sync_publishes_once_after_every_worker_has_loaded(engine: FakeEngine) -> None:
    assert engine.version() == 0
    engine.begin(1, "a", soon(), digest=True)
    assert "version 1" in (engine.reason or "")
    loaded = engine.join(soon())
    assert [worker.digests for worker in loaded] == [{"a": 1}, {"a": 2}]
    assert loaded[0].seconds == {"wait": 0.5, "load": 0.25, "finish": 0.125}
    assert engine.version() == 0, "not before it is published"
    engine.finish(1, "a", soon())
    assert engine.version() == 1
    assert engine.reason is None
    assert engine.calls == ["hello", "update", "publish"]
    assert engine.hooks == ["reset"]


@pytest.mark.parametrize("version", [0, -1])
def test_versions_only_grow(engine: FakeEngine, version: int) -> None:
    with pytest.raises(EngineStateError, match="not newer"):
        engine.begin(version, "a", soon(), digest=False)
    assert (engine.calls, engine.reason) == (["hello"], None)


@pytest.mark.parametrize("second", [{"version": 2, "state": "serving"}, {"version": 1, "state": "torn"}])
def test_workers_that_were_left_in_doubt_serve_after_a_sync(engine: FakeEngine, second: Mapping[str, Any]) -> None:
    engine.answers["hello"] = [{"version": 1, "state": "serving"}, second]
    with pytest.raises(EngineStateError, match=rf"found serving with version 1, {second['state']} with version"):
        engine.version()
    assert engine.reason is not None
    engine.sync(3)
    assert engine.version() == 3
    assert engine.reason is None


# Order: errors come before any call.


def test_join_and_finish_need_a_begin(engine: FakeEngine) -> None:
    with pytest.raises(EngineStateError, match="join without begin"):
        engine.join(soon())
    with pytest.raises(EngineStateError, match="is over"):
        engine.finish(1, "a", soon())
    engine.abort("a", "nothing to abort", soon())
    assert (engine.calls, engine.reason) == ([], None)


@pytest.mark.parametrize(("version", "attempt"), [(1, "b"), (2, "a")])
def test_only_the_open_attempt_can_finish(engine: FakeEngine, version: int, attempt: str) -> None:
    engine.begin(1, "a", soon(), digest=False)
    engine.join(soon())
    with pytest.raises(EngineStateError, match="is over"):
        engine.finish(version, attempt, soon())
    engine.finish(1, "a", soon())
    assert engine.version() == 1


def test_finish_before_join_is_refused_and_harmless(engine: FakeEngine) -> None:
    engine.hold.clear()
    engine.begin(1, "a", soon(), digest=False)
    with pytest.raises(EngineStateError, match="join it before finish"):
        engine.finish(1, "a", soon())
    engine.hold.set()
    engine.join(soon())
    engine.finish(1, "a", soon())
    assert engine.version() == 1


def test_nothing_else_starts_while_an_attempt_is_open(engine: FakeEngine) -> None:
    engine.begin(1, "a", soon(), digest=False)
    engine.join(soon())
    with pytest.raises(EngineStateError, match="not over yet"):
        engine.begin(2, "b", soon(), digest=False)
    with pytest.raises(EngineStateError, match="cannot sleep now"):
        engine.sleep(2)
    with pytest.raises(EngineStateError, match="taking version 1"):
        engine.resume()
    engine.abort("b", "another attempt's failure", soon())
    engine.finish(1, "a", soon())
    assert engine.calls == ["hello", "update", "publish"]


def test_no_begin_while_the_last_call_is_unanswered(engine: FakeEngine) -> None:
    engine.hold.clear()
    engine.begin(1, "a", soon(), digest=False)
    with pytest.raises(SyncTimeout, match="to load version 1"):
        engine.join(soon(0.05))
    engine.abort("a", "the worker is stalled", soon(0.05))
    for forbidden in (
        lambda: engine.begin(2, "b", soon(), digest=False),
        lambda: engine.describe([], soon()),
        lambda: engine.attach(Plan.pack([], 4096), [TICKET], 0, soon()),
    ):
        with pytest.raises(EngineStateError, match="not answered the previous sync"):
            forbidden()
    with pytest.raises(EngineStateError, match="cannot sleep now"):
        engine.sleep(2)
    assert engine.calls == ["hello", "update"], "an unanswered worker is asked nothing"
    engine.close()
    assert engine.calls == ["hello", "update"], "a worker that may still read keeps its receiver"
    engine.hold.set()
    assert engine._update is not None
    engine._update.result(soon())
    engine.sync(2)
    assert (engine.version(), engine.reason) == (2, None)
    assert engine.calls == ["hello", "update", "abort", "update", "publish"]


@pytest.mark.parametrize("method", ["describe", "attach", "update"])
def test_what_was_given_up_without_an_answer_is_ended_before_anything_else(engine: FakeEngine, method: str) -> None:
    fail_update(engine)
    engine.answers["abort"] = SyncTimeout("no answer")
    engine.abort("a", "the worker is stalled", soon())
    again: Mapping[str, Callable[[], object]] = {
        "describe": lambda: engine.describe([], soon()),
        "attach": lambda: engine.attach(Plan.pack([], 4096), [TICKET], 0, soon()),
        "update": lambda: engine.sync(2),
    }
    with pytest.raises(SyncTimeout, match="no answer"):
        again[method]()
    engine.answers.update(abort=[{}, {}], update=updates({}, {}))
    again[method]()
    again[method if method != "update" else "describe"]()
    assert engine.calls[3:5] == ["abort", "abort"]
    assert engine.calls[5] == method
    assert engine.calls.count("abort") == 3, "and only once"


# Pause.


def test_nothing_is_served_between_pause_and_resume(engine: FakeEngine) -> None:
    engine.pause("wait", soon())
    assert engine.reason == "fake is paused for a sync; call resume"
    engine.sync(1)
    assert engine.reason == "fake is paused for a sync; call resume"
    engine.resume()
    assert engine.reason is None


def test_a_pause_that_fails_leaves_it_as_it_was(engine: FakeEngine) -> None:
    with pytest.raises(UnsupportedError):
        engine.pause("keep", soon())
    assert engine.reason is None
    engine.pause("wait", soon())
    with pytest.raises(UnsupportedError):
        engine.pause("keep", soon())
    assert "paused" in str(engine.reason), "by the pause before"


def test_a_resume_that_fails_leaves_it_paused(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(deadline: Deadline) -> None:
        raise PeerError("worker 0 died")

    engine.pause("wait", soon())
    with monkeypatch.context() as patched:
        patched.setattr(engine, "on_resume", lost)
        with pytest.raises(PeerError):
            engine.resume()
    assert "paused" in str(engine.reason)
    engine.resume()
    assert engine.reason is None


# Outcomes of an abort.


def test_abort_before_a_byte_was_written_serves_the_old_version(engine: FakeEngine) -> None:
    fail_update(engine)
    engine.abort("a", "no room", soon())
    assert (engine.version(), engine.reason) == (0, None)
    engine.resume()
    assert engine.hooks == ["resume"]


@pytest.mark.parametrize(
    "answer",
    [
        [{"state": "serving", "version": 0}, {"state": "torn", "version": 0}],
        [{"state": "serving", "version": 1}, {"state": "serving", "version": 0}],
        [{"error": ERROR}, {"state": "serving", "version": 0}],
        PeerError("worker 1 died"),
        ["not a reply", "not a reply"],
    ],
    ids=["one torn", "one ahead", "one fails", "one dead", "nonsense"],
)
def test_abort_that_leaves_doubt_tears(engine: FakeEngine, answer: Any) -> None:
    fail_update(engine)
    if isinstance(answer, list) and isinstance(answer[0], str):
        answer = [wire.pack(word) for word in answer]
    if isinstance(answer, Exception):
        engine.answers["abort"] = answer
    else:
        engine.answers["hello"] = answer
    engine.abort("a", "bucket 3 was lost", soon())
    for refused in (engine.version, engine.resume):
        with pytest.raises(
            EngineStateError, match=r"fake holds no consistent version.*bucket 3 was lost.*Sync it again"
        ):
            refused()
    assert engine.reason is not None
    assert "bucket 3 was lost" in engine.reason
    assert engine.last_version() == 0


def test_a_torn_engine_serves_after_the_next_full_sync(engine: FakeEngine) -> None:
    fail_update(engine)
    engine.answers["hello"] = [{"state": "torn", "version": 0}] * 2
    engine.abort("a", "no room", soon())
    engine.answers["update"] = updates({}, {})
    engine.pause("wait", soon())
    engine.sync(2)
    engine.resume()
    assert (engine.version(), engine.reason) == (2, None)


def test_a_torn_engine_is_not_healed_by_an_abort_that_touched_nothing(engine: FakeEngine) -> None:
    test_abort_that_leaves_doubt_tears(engine, PeerError("worker 1 died"))
    engine.answers["abort"] = [{}, {}]
    engine.begin(2, "b", soon(), digest=False)
    with pytest.raises(PeerError):
        engine.join(soon())
    engine.abort("b", "again", soon())
    with pytest.raises(EngineStateError, match="bucket 3 was lost"):
        engine.version()
    assert engine.reason is not None


@pytest.mark.parametrize("when", ["before begin", "nothing written", "published"])
def test_abort_of_a_part_of_a_replica_tears_whatever_happened_here(engine: FakeEngine, when: str) -> None:
    if when == "nothing written":
        fail_update(engine)
    elif when == "published":
        engine.sync(1)
    engine.abort("a", "rank 1 was lost", soon(), tear=True)
    for refused in (engine.version, engine.resume):
        with pytest.raises(EngineStateError, match="rank 1 was lost"):
            refused()
    assert "rank 1 was lost" in str(engine.reason)
    engine.answers["update"] = updates({}, {})
    engine.sync(2)
    assert (engine.version(), engine.reason) == (2, None)


def test_a_late_abort_that_tears_leaves_the_attempt_under_way(engine: FakeEngine) -> None:
    engine.begin(2, "b", soon(), digest=False)
    engine.abort("a", "rank 1 was lost", soon(), tear=True)
    with pytest.raises(EngineStateError, match="rank 1 was lost"):
        engine.version()
    engine.join(soon())
    engine.finish(2, "b", soon())
    assert (engine.version(), engine.reason) == (2, None)


@pytest.mark.parametrize("step", ["publish", "reset"])
def test_a_failure_to_publish_tears(engine: FakeEngine, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_reset(deadline: Deadline) -> None:
        raise EngineStateError("the cache kept blocks")

    if step == "reset":
        monkeypatch.setattr(engine, "on_reset_cache", no_reset)
    else:
        engine.answers["publish"] = [{}, {"error": ERROR}]
    with pytest.raises(EngineStateError if step == "reset" else PeerError):
        engine.sync(1)
    with pytest.raises(EngineStateError, match="version 1 could not be published"):
        engine.version()
    engine.abort("attempt 1", "too late", soon())
    assert engine.reason is not None
    assert "could not be published" in engine.reason


def test_a_version_that_one_worker_may_have_taken_is_not_asked_for_again(engine: FakeEngine) -> None:
    engine.answers["publish"] = [{}, {"error": ERROR}]
    with pytest.raises(PeerError):
        engine.sync(1)
    assert engine.last_version() == 1, "worker 0 took it"
    with pytest.raises(EngineStateError, match="given version 1; 1 is not newer"):
        engine.begin(1, "b", soon(), digest=False)
    engine.answers["publish"] = [{"read_seconds": 0.0}, {"read_seconds": 0.0}]
    engine.sync(2)
    assert (engine.version(), engine.last_version()) == (2, 2)


# Answers.


def test_an_answer_that_is_no_map_is_a_protocol_error(engine: FakeEngine) -> None:
    engine.answers["describe"] = [wire.pack(["ok"]), wire.pack(["ok"])]
    engine.call = lambda method, payload, timeout_s: engine.answers[method]  # type: ignore[method-assign]
    with pytest.raises(ProtocolError, match="worker 0 of fake answered 'describe' with tuple"):
        engine.describe([], soon())


def test_a_deadline_that_has_passed_makes_no_call(engine: FakeEngine) -> None:
    with pytest.raises(SyncTimeout, match="fake to answer 'describe'"):
        engine.describe([], soon(-1))
    assert engine.calls == []


def test_calls_without_a_deadline_wait_as_long_as_the_last_one_with_one(engine: FakeEngine) -> None:
    def ask() -> set[int]:
        engine.endpoints()
        engine.read("norm")
        engine.close()
        return {round(engine.waits[method] or 0) for method in ("hello", "read", "detach")}

    assert ask() == {120}
    engine.describe([], soon(7))
    assert ask() == {7}
    engine.attach(Plan.pack([], 4096), [TICKET], 0, soon(90))
    assert ask() == {90}
    engine.begin(1, "a", soon(3), digest=False)
    engine.join(soon())
    assert ask() == {3}


def test_close_never_raises(engine: FakeEngine) -> None:
    engine.answers["detach"] = PeerError("worker 0 died")
    engine.close()
    replies: Mapping[str, Any] = engine.answers
    assert engine.calls == ["detach"]
    assert isinstance(replies["detach"], PeerError)


def test_attachment_is_the_address_that_the_next_sync_would_come_from(engine: FakeEngine) -> None:
    plan, other = Plan.pack([], 4096), replace(TICKET, address="two")
    seen = [engine.attachment]
    steps: Sequence[Callable[[], None]] = (
        lambda: engine.attach(plan, [TICKET], 0, soon()),
        lambda: engine.sync(1),
        lambda: engine.attach(plan, [other], 0, soon()),
        lambda: engine.close("one"),
        lambda: engine.close("two"),
        lambda: engine.attach(plan, [other], 0, soon()),
        engine.close,
    )
    for step in steps:
        step()
        seen.append(engine.attachment)
    assert seen == [None, "one", "one", "two", "two", None, "two", None]


def test_a_failure_ends_the_attachment(engine: FakeEngine) -> None:
    plan = Plan.pack([], 4096)
    engine.attach(plan, [TICKET], 0, soon())
    engine.answers["attach"] = [{}, {"error": ERROR}]
    with pytest.raises(PeerError):
        engine.attach(plan, [TICKET], 0, soon())
    assert engine.attachment is None, "one worker is attached and the other is not"
    engine.answers["attach"] = [{}, {}]
    engine.attach(plan, [TICKET], 0, soon())
    fail_update(engine)
    engine.abort("a", "no room", soon())
    assert engine.attachment is None
    engine.answers.update(update=updates({}, {}), publish=[{}, {"error": ERROR}])
    engine.attach(plan, [TICKET], 0, soon())
    with pytest.raises(PeerError):
        engine.sync(2)
    assert engine.attachment is None


def test_a_begin_that_fails_to_start_leaves_nothing_under_way(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.version()

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("wsync.engine.Background", no_thread)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            engine.begin(1, "a", soon(), digest=False)
    engine.abort("a", "no thread", soon())
    assert engine.reason is None, "it serves the old version"
    engine.sync(2)
    assert engine.version() == 2
    assert "abort" in engine.calls, "the workers were not told that attempt a is over"
