"""Real SGLang on the CPU as the engine, in each of the ways into it. The programs do, the tests judge."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang_models import KINDS, WEIGHTS
from tests.engines.sglang_runner import facts_of, run

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

Facts = dict[str, Any]
Tokens = dict[str, list[list[int]]]

EVERYTHING = "untested,update,bits,in_flight,impatient,frozen,on_a_loop,refused,torn,asleep,separate,kit,stalled,killed"
OWN = "update,in_flight,refused,torn,read"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    run(["-m", "tests.engines.sglang_models", folder], folder / "log.txt")
    return folder


@pytest.fixture(scope="module")
def expected(models: Path) -> Tokens:
    """Tokens of transformers by checkpoint; those of two checkpoints differ in every prompt."""
    tokens: Tokens = json.loads((models / "expected.json").read_text())
    for kind in KINDS:
        for one, other in pairwise(WEIGHTS):
            assert all(a != b for a, b in zip(tokens[f"{kind}_{one}"], tokens[f"{kind}_{other}"], strict=True))
    return tokens


@pytest.fixture(scope="module")
def plugin(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return facts_of(models, tmp_path_factory.mktemp("plugin"), "llama", EVERYTHING)


@pytest.fixture(scope="module")
def two_ranks(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return facts_of(models, tmp_path_factory.mktemp("tp2"), "moe", "update,bits,torn,kit", tp=2)


@pytest.fixture(scope="module")
def own_calls(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return facts_of(models, tmp_path_factory.mktemp("own"), "bias", OWN, tp=2, way="own calls")


def check_update(facts: Facts, expected: Tokens, kind: str, transport: str, through_loader: int) -> None:
    """Tokens of transformers before and after each of three syncs, and nothing of the old weights in the cache."""
    assert facts["cached"] > 100, "the long prompt was not in the radix cache: its tokens prove nothing"
    for weights in WEIGHTS:
        assert facts["tokens"][weights] == expected[f"{kind}_{weights}"], weights
    assert (facts["transport"], facts["through loader"]) == (transport, through_loader)
    assert facts["version"] == 3
    assert not facts["guarded"]


def check_bits(facts: Facts, tensors: int) -> None:
    """Every parameter as SGLang's own load makes it, and each another one than before."""
    assert facts["tensors"] == tensors
    assert facts["differ"] == []
    assert facts["unchanged"] == []


def check_kit(facts: Facts) -> None:
    """Every check of the engine kit."""
    failed = {name: said for name, said in facts.items() if said != "ok"}
    assert len(facts) >= 8
    assert not failed, "\n".join(failed.values())


def check_torn(facts: Facts, expected: Tokens, kind: str) -> None:
    """Refused while torn, and healed by the next sync."""
    assert facts["error"] == ["RuntimeError", "tripped"]
    assert facts["generate"][0] == "EngineStateError"
    assert "tripped" in facts["generate"][1]
    assert facts["tokens"] == expected[f"{kind}_b"]


def check_refused(facts: Facts, surplus: str) -> None:
    """Nothing that does not fit gets as far as a byte."""
    for case, name in (("missing", "k"), ("wrong shape", "k_proj"), ("surplus", "surplus")):
        kind, message = facts[case]
        assert kind == "MismatchError", f"{case}: {message}"
        assert name in message
    assert surplus in facts["surplus"][1]
    assert facts["same tokens"]


def check_in_flight(facts: Facts, expected: Tokens, kind: str) -> None:
    """Finished with the old weights, ended, or gone on with under the new ones."""
    assert facts["wait"] == {"reason": "length", "length": 200, "kept": 200, "went on": True}
    assert facts["abort"]["reason"] == "abort"
    assert 0 < facts["abort"]["kept"] == facts["abort"]["length"] < 200
    assert facts["keep"]["reason"] == "length"
    assert facts["keep"]["length"] == 200
    assert 0 < facts["keep"]["kept"] < 200, "the request was not in its middle"
    assert facts["keep"]["went on"], "it did not go on as the engine does with the new weights"
    assert facts["tokens"] == expected[f"{kind}_b"]


class TestPlugin:
    """One scheduler process."""

    def test_update(self, plugin: Facts, expected: Tokens) -> None:
        check_update(plugin["update"], expected, "llama", "shm", 0)
        assert "verified: 21 of 21 tensors" in plugin["update"]["explained"]

    def test_every_bit(self, plugin: Facts) -> None:
        check_bits(plugin["bits"], 15)

    def test_requests_in_flight(self, plugin: Facts, expected: Tokens) -> None:
        check_in_flight(plugin["in_flight"], expected, "llama")

    def test_requests_and_sync_on_one_event_loop(self, plugin: Facts, expected: Tokens) -> None:
        assert plugin["on_a_loop"] == {"length": 200, "tokens": expected["llama_d"]}

    def test_what_does_not_fit_is_refused(self, plugin: Facts) -> None:
        check_refused(plugin["refused"], "ignores it")

    def test_torn(self, plugin: Facts, expected: Tokens) -> None:
        check_torn(plugin["torn"], expected, "llama")

    def test_weights_that_the_user_put_to_sleep(self, plugin: Facts, expected: Tokens) -> None:
        assert "release_memory_occupation" in plugin["asleep"]["sync"][1]
        assert plugin["asleep"]["tokens"] == expected["llama_c"]

    def test_the_cache_leaves_alone_for_a_sync(self, plugin: Facts, expected: Tokens) -> None:
        assert plugin["separate"]["asleep"][0] == "EngineStateError"
        assert plugin["separate"]["steps"] == [
            *("release engine generation", "release engine kv_cache", "empty cache"),
            *("restore engine kv_cache", "restore engine generation"),
        ]
        assert plugin["separate"]["tokens"] == expected["llama_b"]

    def test_a_pause_that_gives_up_leaves_no_trace(self, plugin: Facts) -> None:
        facts = plugin["impatient"]
        kind, message = facts["error"]
        assert kind == "SyncTimeout"
        assert "1 request(s) of SGLang" in message
        assert (facts["length"], facts["generated"]) == (200, 4)

    def test_a_kept_request_outlives_a_sync_that_fails(self, plugin: Facts, expected: Tokens) -> None:
        assert plugin["frozen"] == {
            "error": ["RuntimeError", "tripped"],
            "reason": "abort",
            "tokens": expected["llama_b"],
        }

    def test_kit(self, plugin: Facts) -> None:
        check_kit(plugin["kit"])

    def test_a_stalled_worker_is_given_up_at_the_deadline(self, plugin: Facts, expected: Tokens) -> None:
        facts = plugin["stalled"]
        assert "gave up after 6 s" in facts["error"][1]
        assert facts["generate"][0] == "EngineStateError"
        assert facts["next sync"][0] == "EngineStateError"
        assert "has not answered" in facts["next sync"][1]
        assert facts["its late answer"][0] == "PeerError"
        assert facts["tokens"] == expected["llama_b"]

    def test_a_killed_worker_is_noticed_at_once(self, plugin: Facts) -> None:
        facts = plugin["killed"]
        assert facts["error"][0] == "PeerError"
        assert facts["seconds"] < 30, "the deadline is 60 s"
        assert facts["generate"][0] == "EngineStateError"
        assert facts["next sync"][0] == "PeerError"
        assert "start a new sglang.Engine" in facts["next sync"][1]

    def test_an_untested_version_is_taken_only_when_asked(self, plugin: Facts) -> None:
        kind, message = plugin["untested"]["refused"]
        assert kind == "UnsupportedError"
        assert "0.9.1" in message
        assert "allow_untested=True" in message
        assert plugin["untested"]["taken"] == "SGLang 0.9.1"


class TestTwoRanks:
    """Tensor parallelism over two scheduler processes, with experts."""

    def test_update(self, two_ranks: Facts, expected: Tokens) -> None:
        check_update(two_ranks["update"], expected, "moe", "shm", 0)
        assert two_ranks["update"]["explained"].count("verified: 45 of 45 tensors") == 2

    def test_every_bit(self, two_ranks: Facts) -> None:
        check_bits(two_ranks["bits"], 2 * 21)

    def test_torn(self, two_ranks: Facts, expected: Tokens) -> None:
        check_torn(two_ranks["torn"], expected, "moe")

    def test_kit(self, two_ranks: Facts) -> None:
        check_kit(two_ranks["kit"])


class TestOwnCalls:
    """No worker half was there when the engine was started."""

    def test_update(self, own_calls: Facts, expected: Tokens) -> None:
        check_update(own_calls["update"], expected, "bias", "inproc", 26)
        assert "SGLang 0.5.23 (own calls)" in own_calls["update"]["explained"]

    def test_requests_in_flight(self, own_calls: Facts, expected: Tokens) -> None:
        check_in_flight(own_calls["in_flight"], expected, "bias")

    def test_what_does_not_fit_is_refused(self, own_calls: Facts) -> None:
        check_refused(own_calls["refused"], "is not in the checkpoint")

    def test_torn(self, own_calls: Facts, expected: Tokens) -> None:
        check_torn(own_calls["torn"], expected, "bias")

    def test_weights_cannot_be_shown(self, own_calls: Facts) -> None:
        assert own_calls["read"][0] == "PeerError"
        assert "plugin" in own_calls["read"][1]


def test_custom_weight_loader(models: Path, expected: Tokens, tmp_path: Path) -> None:
    facts = facts_of(models, tmp_path, "tied", "update,bits,torn", way="loader")
    check_update(facts["update"], expected, "tied", "shm", 0)
    check_bits(facts["bits"], 14)
    check_torn(facts["torn"], expected, "tied")


def test_demo_with_a_trainer_under_fsdp2_on_two_ranks(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    output = run([*launcher, "-m", "examples.demo", "--engine", "sglang"], tmp_path / "log.txt")
    assert "\ndemo: ok" in output
    assert "bit-equal tensors: all" in output
