"""Real vLLM and SGLang with two workers each, and an FSDP2 trainer: who is stopped or killed in the middle of a pull.

The program does, the tests judge. Whatever happens the engine serves the old version, the new one, or refuses to.
"""

import json
from typing import Any

import pytest

from tests.engines.vllm_runner import run_program

Facts = dict[str, Any]

ENGINES = [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
pytestmark = pytest.mark.slow

NOTHING = ["nothing", ""]
TIMEOUT_S = 400.0


@pytest.fixture(scope="module", params=ENGINES)
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    folder = tmp_path_factory.mktemp(request.param)
    run_program("tests.e2e.pull_failures", [request.param, folder], folder / "log.txt", TIMEOUT_S=TIMEOUT_S)
    found: Facts = json.loads((folder / "facts.json").read_text())
    return found


def check_bits(facts: Facts) -> None:
    """Every parameter of both workers is what the engine's own loader makes of the trainer's weights; it serves."""
    assert facts["parameters"] == [15, 15]
    assert facts["differ"] == facts["not loaded"] == facts["not as at the start"] == []
    assert facts["refused"] == {"version": NOTHING, "generate": NOTHING}


def check_healed(facts: Facts) -> None:
    """So it is after the next sync, which read each byte that is needed once."""
    check_bits(facts)
    assert facts["pulled"] == facts["least"]


def check_refused(facts: Facts) -> None:
    """The engine neither has a version nor generates."""
    for kind, message in facts.values():
        assert kind == "EngineStateError"
        assert "holds no consistent version" in message


def check_in_the_middle(facts: Facts) -> None:
    """The worker had begun to read, and was not through."""
    assert 0 < facts["note"]["read"] < facts["note"]["of"]


def test_undisturbed(facts: Facts) -> None:
    check_healed(facts["undisturbed"])


def test_a_trainer_that_is_stopped_and_goes_on_in_time_is_read_meanwhile(facts: Facts) -> None:
    part = facts["trainer_goes_on"]
    check_in_the_middle(part)
    assert part["error"][:2] == NOTHING
    check_bits(part)


@pytest.mark.parametrize("who", ["other_stopped", "owner_stopped"])
def test_a_trainer_that_is_stopped_past_the_deadline(facts: Facts, who: str) -> None:
    part = facts[who]
    check_in_the_middle(part)
    assert all(kind in ("RankError", "SyncTimeout") for kind, _, _ in part["errors"])
    assert all(seconds < 40 for _, _, seconds in part["errors"]), "patience is 5 s, and 10.5 s for other ranks"
    check_refused(part["refused"])
    check_healed(part["healed"])


def test_a_worker_that_is_stopped_past_the_deadline(facts: Facts) -> None:
    part = facts["worker_stopped"]
    check_in_the_middle(part)
    (kind, message, _), (other, _, _) = part["errors"]
    assert (kind, other) == ("SyncTimeout", "RankError")
    assert "gave up after 5 s" in message
    assert [kind for kind, _, _ in part["too early"]] == ["EngineStateError", "RankError"]
    assert "has not answered" in part["too early"][0][1]
    check_refused(part["refused"])
    check_refused(part["refused then"])
    check_healed(part["healed"])


def test_a_trainer_that_is_killed(facts: Facts) -> None:
    part = facts["trainer_killed"]
    check_in_the_middle(part)
    kind, message, seconds = part["error"]
    assert kind in ("PeerError", "RankError")
    assert "is gone" in message or "died" in message
    assert seconds < 30, "the deadline is 60 s"
    check_refused(part["refused"])
    check_healed(part["healed"])


def test_a_worker_that_is_killed(facts: Facts) -> None:
    part = facts["worker_killed"]
    check_in_the_middle(part)
    kind, _, seconds = part["error"]
    assert kind == "PeerError"
    assert seconds < 30, "the deadline is 60 s"
    check_refused(part["refused"])
    kind, message, _ = part["next sync"]
    assert kind == "PeerError"
    assert "start a new" in message
