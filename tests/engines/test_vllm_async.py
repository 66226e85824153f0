"""Real `AsyncLLM` of vLLM's CPU build as the engine. The program does, the tests judge."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_async_program import LONG
from tests.engines.vllm_runner import facts_of, run_program

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

Facts = dict[str, Any]
Expected = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    run_program("tests.engines.vllm_models", [folder], folder / "log.txt")
    return folder


@pytest.fixture(scope="module")
def expected(models: Path) -> Expected:
    """Tokens of transformers by checkpoint; those of two checkpoints differ in every prompt."""
    tokens: Expected = json.loads((models / "expected.json").read_text())
    assert all(a != b for a, b in zip(tokens["llama_a"], tokens["llama_b"], strict=True))
    return tokens


@pytest.fixture(scope="module")
def facts(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return facts_of("tests.engines.vllm_async_workers", models, tmp_path_factory.mktemp("async"), TIMEOUT_S=800.0)[0]


@pytest.mark.parametrize(("part", "workers"), [("update", 1), ("update tp 2", 2)])
def test_three_syncs(facts: Facts, expected: Expected, part: str, workers: int) -> None:
    """Tokens of transformers after each, bits of vLLM's own load, every parameter new and where it was."""
    seen = facts[part]
    assert seen["tokens"] == [expected[f"llama_{weights}"] for weights in "abab"]
    assert seen["cached"] == [128] * 3, "the long prompt was not in the prefix cache: its tokens prove nothing"
    assert seen["versions"] == [1, 2, 3]
    assert seen["as a fresh load"]
    assert seen["same addresses"]
    assert seen["changed"] == [15] * workers
    assert (seen["transport"], seen["through loader"]) == ("shm", 0)
    assert seen["guard left"] == []


def test_an_async_llm_that_cannot_be_served_is_refused(facts: Facts) -> None:
    seen = facts["outside"]
    assert seen["no loop"][0] == "ConfigError"
    assert "has no event loop yet" in seen["no loop"][1]
    kind, message = seen["worker_extension_cls"]
    assert kind == "ConfigError"
    assert 'worker_extension_cls="wsync.adapters.engines.vllm_worker.WorkerExtension"' in message
    kind, message = seen["data_parallel_size"]
    assert kind == "UnsupportedError"
    assert "data_parallel_size=2" in message


def check_went_on(seen: Facts) -> None:
    """A request began under old weights, and went on with new ones and without old caches."""
    assert 0 < seen["kept"] < LONG, "it was not in its middle"
    assert (len(seen["tokens"]), seen["reason"]) == (LONG, "length")
    assert seen["went on"], "it did not go on as the new weights do with the tokens so far as a prompt"


class TestRequestsInFlight:
    def test_wait_finishes_them_with_the_old_weights(self, facts: Facts, expected: Expected) -> None:
        seen = facts["pauses"]
        assert (seen["wait"]["tokens"], seen["wait"]["reason"]) == (seen["alone"], "length")
        assert seen["tokens"] == expected["llama_b"]

    def test_abort_ends_them(self, facts: Facts) -> None:
        seen = facts["pauses"]["abort"]
        assert seen["reason"] == "abort"
        assert 0 < len(seen["tokens"]) == seen["kept"] < LONG, "it was not in its middle, or its tokens changed"

    def test_keep_goes_on_with_the_new_weights_and_without_old_caches(self, facts: Facts) -> None:
        check_went_on(facts["pauses"]["keep"])

    def test_at_sleep_level_0_they_stand_still_through_a_sync(self, facts: Facts, expected: Expected) -> None:
        seen = facts["level 0"]
        for moment in ("generate", "generate after a sync"):
            kind, message = seen[moment]
            assert kind == "EngineStateError"
            assert "is asleep (scheduling); call wake_up first" in message
        assert seen["stood"]
        check_went_on(seen)
        assert seen["tokens then"] == expected["llama_b"]


class TestFailures:
    def test_kept_requests_of_a_sync_that_wrote_nothing_go_on_with_the_old_weights(self, facts: Facts) -> None:
        seen = facts["failures"]
        assert seen["error before a byte"] == ["RuntimeError", "tripped"]
        assert seen["went on with the old"] == {"tokens": facts["pauses"]["alone"], "reason": "length"}

    def test_a_torn_engine_refuses_new_requests_and_keeps_frozen_ones(self, facts: Facts, expected: Expected) -> None:
        seen = facts["failures"]
        assert seen["error"] == seen["error again"] == ["RuntimeError", "tripped"]
        for name in ("generate", "add_request"):
            kind, message = seen[name]
            assert kind == "EngineStateError"
            assert "tripped" in message
        assert seen["frozen"], "a torn engine went on with a request"
        assert (len(seen["healed"]["tokens"]), seen["healed"]["reason"]) == (LONG, "length")
        assert seen["tokens healed"] == expected["llama_b"]

    def test_frozen_requests_can_be_ended_by_the_next_sync(self, facts: Facts, expected: Expected) -> None:
        seen = facts["failures"]
        assert seen["ended"]["reason"] == "abort"
        assert 0 < len(seen["ended"]["tokens"]) < LONG
        assert seen["tokens"] == expected["llama_a"]

    def test_a_pause_that_is_given_up_leaves_nothing_behind(self, facts: Facts) -> None:
        seen = facts["impatient"]
        assert seen["wait"][0] == seen["keep"][0] == "SyncTimeout"
        assert seen["length"] == seen["length after keep"] == LONG

    def test_a_stalled_core_is_given_up_at_the_deadline(self, facts: Facts, expected: Expected) -> None:
        seen = facts["stalled"]
        assert "gave up after 3 s" in seen["error"][1]
        assert seen["generate"][0] == "EngineStateError"
        assert seen["next sync"][0] == "EngineStateError"
        assert "has not answered the previous sync yet" in seen["next sync"][1]
        assert seen["its late answer"][0] == "PeerError"
        assert seen["tokens healed"] == expected["llama_b"]

    def test_a_killed_worker_is_noticed_at_once(self, facts: Facts) -> None:
        seen = facts["killed"]
        assert seen["error"][0] == "PeerError"
        assert seen["seconds"] < 30, "the deadline is 60 s"
        assert seen["generate"][0] == "EngineStateError"
        assert seen["next sync"][0] == "PeerError"
        assert "start a new AsyncLLM" in seen["next sync"][1]

    def test_one_that_was_shut_down_or_deleted_says_so(self, facts: Facts) -> None:
        seen = facts["ended"]
        assert seen["shut down"][0] == "PeerError"
        assert "it was shut down" in seen["shut down"][1]
        assert seen["collected"], "something holds the AsyncLLM"
        assert seen["gone"][0] == "EngineStateError"
        assert "the AsyncLLM was deleted" in seen["gone"][1]


def test_other_tasks_generate_while_a_sync_runs(facts: Facts, expected: Expected) -> None:
    """Each answer is of old weights or of new ones; what came in between was refused; the loop went on."""
    seen = facts["together"]
    assert sorted(seen["answers"]) == sorted([expected["llama_a"][1], expected["llama_b"][1]])
    assert seen["last"] == expected["llama_b"][1]
    assert all(beats > 0 for beats in seen["beats"])
    assert seen["refusals"]
    for kind, message in seen["refusals"]:
        assert kind == "EngineStateError"
        assert "paused for a sync" in message or "is taking version" in message


def test_calls_on_the_thread_of_the_loop_say_what_to_do(facts: Facts, expected: Expected) -> None:
    seen = facts["on the loop"]
    assert seen["sync"][0] == "ConfigError"
    assert "sync_async" in seen["sync"][1]
    assert seen["wake_up"][0] == "EngineStateError"
    assert "asyncio.to_thread" in seen["wake_up"][1]
    assert seen["paused outside"][0] == "EngineStateError"
    assert "resume_generation()" in seen["paused outside"][1]
    assert seen["tokens"] == expected["llama_b"]


def test_kit(facts: Facts) -> None:
    failed = {name: said for name, said in facts["kit"].items() if said != "ok"}
    assert len(facts["kit"]) >= 6
    assert not failed, "\n".join(failed.values())
