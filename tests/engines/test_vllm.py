"""Real vLLM (its CPU build) as the engine, in each of the ways to run it. The programs do, the tests judge."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_models import KINDS
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
    for kind in KINDS:
        assert all(a != b for a, b in zip(tokens[f"{kind}_a"], tokens[f"{kind}_b"], strict=True))
    return tokens


@pytest.fixture(scope="module")
def in_process(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return facts_of("tests.engines.vllm_inproc", models, tmp_path_factory.mktemp("inproc"))[0]


@pytest.fixture(scope="module")
def workers(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return facts_of("tests.engines.vllm_workers", models, tmp_path_factory.mktemp("workers"))[0]


@pytest.fixture(scope="module")
def launched(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    return facts_of("tests.engines.vllm_launcher", models, tmp_path_factory.mktemp("launcher"), ranks=2)


@pytest.fixture(scope="module")
def adapters(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return facts_of("tests.engines.vllm_lora_workers", models, tmp_path_factory.mktemp("adapters"))[0]


def check_update(facts: Facts, expected: Expected, kind: str, transport: str) -> None:
    """Tokens of transformers before and after, bits of vLLM's own load, every parameter new and where it was."""
    assert facts["tokens before"] == expected[f"{kind}_a"]
    assert facts["cached tokens"] == 128, "the long prompt was not in the prefix cache: its tokens prove nothing"
    assert facts["tokens after"] == expected[f"{kind}_b"]
    assert facts["as a fresh load"]
    assert all(changed == {"llama": 15, "tied": 19}[kind] for changed in facts["changed"])
    assert facts["same addresses"]
    assert facts["guard left"] == []
    assert (facts["transport"], facts["through loader"]) == (transport, 0)


def check_kit(facts: Facts) -> None:
    """Every check of the engine kit."""
    failed = {name: said for name, said in facts["kit"].items() if said != "ok"}
    assert len(facts["kit"]) >= 6
    assert not failed, "\n".join(failed.values())


def check_refusals(facts: Facts, expected: list[list[int]]) -> None:
    """Nothing that does not fit gets as far as a byte."""
    for case, name in (("missing", "qkv_proj"), ("wrong shape", "q_proj"), ("too long", "down_proj")):
        kind, message = facts[case]
        assert kind == "MismatchError", f"{case}: {message}"
        assert name in message
    assert facts["unchanged"]
    assert facts["tokens"] == expected


def check_torn(facts: Facts, expected: list[list[int]]) -> None:
    """Every way to use a torn engine is closed, until a full sync."""
    assert facts["error"] == ["RuntimeError", "tripped"]
    for entry in ("generate", "enqueue", "step"):
        kind, message = facts[entry]
        assert kind == "EngineStateError"
        assert "tripped" in message
    assert facts["tokens healed"] == expected


class TestInProcess:
    def test_update(self, in_process: Facts, expected: Expected) -> None:
        check_update(in_process["unpacked"]["update"], expected, "llama", "inproc")

    def test_update_of_tied_weights(self, in_process: Facts, expected: Expected) -> None:
        check_update(in_process["tied"]["update"], expected, "tied", "inproc")

    def test_kit(self, in_process: Facts) -> None:
        check_kit(in_process["unpacked"])

    def test_what_does_not_fit_is_refused(self, in_process: Facts, expected: Expected) -> None:
        check_refusals(in_process["unpacked"]["refused"], expected["llama_a"])

    def test_torn(self, in_process: Facts, expected: Expected) -> None:
        check_torn(in_process["unpacked"]["torn"], expected["llama_b"])

    def test_requests_in_flight(self, in_process: Facts) -> None:
        facts = in_process["unpacked"]["requests"]
        kind, message = facts["wait"]
        assert kind == "EngineStateError"
        assert "1 unfinished request(s)" in message
        assert facts["finished after wait was refused"] == 16
        assert facts["unfinished after abort"] == 0
        assert 0 < facts["kept"] < 16, "the request was not in its middle"
        assert facts["kept tokens"]
        assert facts["went on"], "it did not go on as transformers does with the new weights"

    def test_requests_outlive_a_sync_that_fails(self, in_process: Facts) -> None:
        facts = in_process["unpacked"]["requests"]
        assert facts["frozen, failed at 0"] == 16
        assert facts["of a torn engine"][0] == "EngineStateError"
        assert facts["frozen, failed at 2"] == 16

    def test_sleep_of_the_users_own(self, in_process: Facts, expected: Expected) -> None:
        facts = in_process["unpacked"]["asleep"]
        assert facts["sync"][0] == "EngineStateError"
        assert "llm.sleep" in facts["sync"][1]
        assert facts["weights awake"] == ["nothing", ""]
        assert facts["tokens"] == expected["llama_b"]


class TestRepacked:
    """vLLM's CPU build as it comes: linear weights are packed for oneDNN, and a layerwise reload loads them."""

    @pytest.mark.parametrize(("part", "kind", "tensors"), [("repacked", "bias", 26), ("moe", "moe", 45)])
    def test_update(self, in_process: Facts, expected: Expected, part: str, kind: str, tensors: int) -> None:
        facts = in_process[part]["update"]
        assert facts["tokens before"] == expected[f"{kind}_a"]
        assert facts["tokens after"] == expected[f"{kind}_b"]
        assert facts["through loader"] == [tensors, tensors]
        assert facts["same addresses"]
        assert "0 tensors copied by plan (unverified: vLLM repacked its weights" in facts["explained"]
        assert f"{tensors} tensor(s) through the engine's own loader (" in facts["explained"]
        assert "its layerwise reload takes tensors and repacks each layer" in facts["explained"]

    def test_kit(self, in_process: Facts) -> None:
        check_kit(in_process["repacked"])

    def test_what_does_not_fit_is_refused(self, in_process: Facts, expected: Expected) -> None:
        check_refusals(in_process["repacked"]["refused"], expected["bias_b"])

    def test_torn(self, in_process: Facts, expected: Expected) -> None:
        check_torn(in_process["repacked"]["torn"], expected["bias_b"])

    def test_weights_cannot_be_shown(self, in_process: Facts) -> None:
        kind, message = in_process["repacked"]["read"]
        assert kind == "PeerError"
        assert "repacked" in message

    def test_nothing_holds_the_engine(self, in_process: Facts) -> None:
        assert in_process["repacked"]["collected"]

    def test_an_untested_version_is_taken_only_when_asked(self, in_process: Facts) -> None:
        facts = in_process["repacked"]["untested"]
        kind, message = facts["refused"]
        assert kind == "UnsupportedError"
        assert "0.99.1" in message
        assert "allow_untested=True" in message
        assert facts["taken"] == facts["known from then on"] == "vLLM 0.99.1"


@pytest.mark.parametrize("tp", [1, 2])
class TestWorkerProcesses:
    def test_update(self, workers: Facts, expected: Expected, tp: int) -> None:
        check_update(workers[f"tp {tp}"]["update"], expected, "llama", "shm")
        assert len(workers[f"tp {tp}"]["update"]["changed"]) == tp

    def test_requests_in_flight(self, workers: Facts, expected: Expected, tp: int) -> None:
        assert workers[f"tp {tp}"]["in flight"] == {"abort": [], "keep": [16], "tokens": expected["llama_a"]}

    def test_the_extension_is_asked_for(self, workers: Facts, tp: int) -> None:
        facts = workers[f"tp {tp}"]["extension"]
        for kind, message in (facts["none"], facts["other"]):
            assert kind == "ConfigError"
            assert 'worker_extension_cls="wsync.adapters.engines.vllm_worker.WorkerExtension"' in message
        assert "OrderedDict" in facts["other"][1]

    def test_a_stalled_worker_is_given_up_at_the_deadline(self, workers: Facts, expected: Expected, tp: int) -> None:
        facts = workers[f"tp {tp}"]["stalled"]
        assert "gave up after 3 s" in facts["error"][1]
        assert facts["generate"][0] == "EngineStateError"
        assert facts["next sync"][0] == "EngineStateError"
        assert "has not answered" in facts["next sync"][1]
        assert facts["its late answer"][0] == "PeerError"
        assert facts["tokens healed"] == expected["llama_b"]

    def test_a_killed_process_is_noticed_at_once(self, workers: Facts, tp: int) -> None:
        facts = workers[f"tp {tp}"]["killed"]
        assert facts["error"][0] == "PeerError"
        assert facts["seconds"] < 30, "the deadline is 60 s"
        assert facts["generate"][0] == "EngineStateError"
        assert facts["next sync"][0] == "PeerError"
        assert "start a new vllm.LLM" in facts["next sync"][1]


def test_kit_with_two_worker_processes(workers: Facts) -> None:
    check_kit(workers["tp 2"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tp", [1, 2])
class TestExternalLauncher:
    """An FSDP2 trainer and the engines on the same ranks; with tensor parallelism each has a part of one engine."""

    def test_update(self, launched: list[Facts], expected: Expected, tp: int, rank: int) -> None:
        check_update(launched[rank][f"tp {tp}"], expected, "llama", "inproc")

    def test_parts_of_one_replica_say_so(self, launched: list[Facts], tp: int, rank: int) -> None:
        mine, other = (launched[r][f"tp {tp}"]["replica"] for r in (rank, 1 - rank))
        assert (mine == other) is (tp == 2)

    def test_torn_on_every_rank(self, launched: list[Facts], expected: Expected, tp: int, rank: int) -> None:
        facts = launched[rank][f"tp {tp}"]["torn"]
        assert facts["error"][0] == ("RankError", "RuntimeError")[rank]
        assert facts["generate"][0] == "EngineStateError"
        assert facts["tokens healed"] == expected["llama_b"]

    def test_nothing_holds_the_engine(self, launched: list[Facts], tp: int, rank: int) -> None:
        assert launched[rank][f"tp {tp}"]["collected"]


class TestAdaptersAlone:
    """Two worker processes, each with its part of the layers."""

    def test_three_adapters_in_turn(self, adapters: Facts, expected: Expected) -> None:
        facts = adapters["rounds"]
        said = [facts[f"adapter {seed}"] for seed in (1, 2, 3)]
        assert all(got == wanted for got, wanted in said)
        assert len({str(got) for got, _ in said}) == 3
        assert facts["base before"] == facts["base after"] == expected["llama_a"]

    def test_layers_hold_what_vllms_own_load_puts_there(self, adapters: Facts) -> None:
        assert adapters["as loaded"] == [True, True]

    def test_what_does_not_fit_is_refused(self, adapters: Facts) -> None:
        facts = adapters["refused"]
        for case, words in {
            "rank": "its rank is 16, the engine's max_lora_rank is 8",
            "dora": "q_proj.lora_magnitude_vector: vLLM",
            "embedding": "embed_tokens.lora_embedding_",
            "head": "lm_head.weight: vLLM",
            "shape": "do not fit 64 inputs and 64 outputs",
        }.items():
            kind, message = facts[case]
            assert kind == "MismatchError", f"{case}: {message}"
            assert words in message
            assert "lora='merged' suits every other engine" in message
        assert facts["unchanged"]

    def test_never_half_of_an_adapter(self, adapters: Facts) -> None:
        facts = adapters["torn"]
        assert facts["adapter"][0] == "TransportError"
        assert facts["generate"][0] == "EngineStateError"
        got, wanted = facts["healed"]
        assert got == wanted

    def test_an_adapter_does_not_make_broken_base_weights_whole(self, adapters: Facts, expected: Expected) -> None:
        facts = adapters["torn"]
        assert facts["weights"] == ["RuntimeError", "tripped"]
        assert "sync all weights first" in facts["adapter on broken weights"][1]
        assert facts["generate then"][0] == "EngineStateError"
        assert facts["base"] == expected["llama_b"]
        assert facts["adapters"] == [1], "an adapter of the old base weights stayed"
        for sync in ("on the new base", "merged"):
            got, wanted = facts[sync]
            assert got == wanted
