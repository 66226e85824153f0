"""What a strategy can be asked, in the words that trainers written for others know it by."""

import inspect
from typing import Any

import pytest

from integrations.ppo.strategy.base import EngineStatus, Strategy
from integrations.ppo.strategy.deepspeed import DeepspeedStrategy
from integrations.ppo.strategy.fsdp2 import FSDPV2Strategy
from tests.ppo.strategy_steps import (
    accumulated,
    clipped_alone,
    not_set_up,
    numbers_over_ranks,
    optimizers_unpaired,
    reloaded,
    set_up,
    sharded,
)
from wsync.testing.ranks import run_ranks

NEEDED = inspect.Parameter.empty
CALLS: dict[str, dict[str, Any]] = {
    "setup_inference_engine": {"args": NEEDED, "engine_type": "vllm", "actor": None},
    "update_engine_weights": {"actor": NEEDED},
    "maybe_sleep_inference_engine": {},
    "wakeup_inference_engine": {},
    "maybe_load_optimizer": {"optimizer": NEEDED, "device": None},
    "maybe_offload_optimizer": {"optimizer": NEEDED},
    "backward": {"loss": NEEDED, "model": NEEDED, "optimizer": NEEDED},
    "optimizer_step": {"optimizer": NEEDED, "model": NEEDED, "scheduler": NEEDED, "name": "model"},
    "prepare_model": {"model": NEEDED, "is_training": False, "shard_size": -1},
    "reload_model": {"models": NEEDED},
    "offload_model": {"models": NEEDED},
    "report_memory": {"prefix": NEEDED},
    "gather_and_generate": {"sampling_params": NEEDED, "all_prompt_token_ids": None, "all_prompts": None},
}
"""Names and defaults of what is passed by place; more may follow. R6 to R10 and R46."""

STRATEGIES = ["--fsdp", "--zero_stage 2", pytest.param("--zero_stage 3", marks=pytest.mark.matrix)]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("strategy", [FSDPV2Strategy, DeepspeedStrategy])
def test_calls_have_the_names_that_are_known(strategy: type[Strategy], name: str) -> None:
    taken = list(inspect.signature(getattr(strategy, name)).parameters.values())[1:]
    by_place = {one.name: one.default for one in taken if one.kind is one.POSITIONAL_OR_KEYWORD}
    assert list(by_place.items())[: len(CALLS[name])] == list(CALLS[name].items())
    assert all(one.default is not NEEDED for one in taken[len(CALLS[name]) :])


def test_the_status_has_the_numbers_that_are_known() -> None:
    assert (EngineStatus.SLEEPED, EngineStatus.WAKEUP) == (0, 1)
    assert inspect.signature(FSDPV2Strategy.gather_and_generate).parameters["sleep_engine"].default is True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kind"),
    [("--fsdp", "FSDPV2Strategy"), ("", "DeepspeedStrategy"), ("--zero_stage 3", "DeepspeedStrategy")],
)
def test_arguments_choose_a_strategy_whose_numbers_are_those_of_all_ranks(options: str, kind: str) -> None:
    found = run_ranks(numbers_over_ranks, 2, options, timeout_s=120)
    for rank, facts in enumerate(found):
        assert facts["type"] == kind
        assert facts["mean"] == ([1.5, 4], 1.5, {"a": 4, "b": 1.5})
        assert facts["sum"] == ([3, 8], 3, {"a": 8, "b": 3})
        assert facts["max"] == ([2, 4], 2, {"a": 4, "b": 2})
        assert facts["given"] == [rank + 1, 4], "what is passed stays as it is"
        assert "no 'min'" in facts["min"]
        assert facts["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert facts["rank 0"] == (rank == 0)
        assert facts["printed"] == ("words 1\n" if rank == 0 else "")
        assert facts["memory"].startswith("here")
    in_order, shuffled = ([facts["data"][index] for facts in found] for index in (0, 1))
    for parts in (in_order, shuffled):
        assert [len(batch) for part in parts for batch in part] == [2] * 6
        assert len({text for part in parts for batch in part for text in batch}) == 12, "ranks have parts of their own"
    assert in_order != shuffled


@pytest.mark.slow
@pytest.mark.parametrize("options", STRATEGIES)
def test_micro_batches_are_counted_model_by_model(options: str) -> None:
    """R10: a step after the second one, each model's own."""
    for seen in run_ranks(accumulated, 2, options, timeout_s=120):
        assert seen[:4] == [
            ("actor", False, [False, False]),
            ("critic", False, [False, False]),
            ("actor", True, [True, False]),
            ("critic", True, [True, True]),
        ]
        assert [norm for _, norm, _ in seen[4:]] == [False, False, True, True]


@pytest.mark.slow
def test_a_step_leaves_the_other_model_alone() -> None:
    """R69: a trainer was seen to clip the critic's gradients with the actor's."""
    for before, after, of_actor in run_ranks(clipped_alone, 2, timeout_s=120):
        assert before == after
        assert before > 0.001
        assert of_actor > 0.001, "nothing had to be clipped"


@pytest.mark.slow
@pytest.mark.parametrize("options", STRATEGIES[:2])
def test_calls_for_optimizers_need_no_partner(options: str) -> None:
    """R60; and whoever asks for one brings the other as well, so that none is forgotten: R70."""
    both = ["actor optimizer", "critic optimizer"]
    for found in run_ranks(optimizers_unpaired, 2, options, timeout_s=120):
        assert found[:5] == [[], both, both, [], []]
        assert "actor's optimizer steps weights on cpu, not on meta" in found[5]
        assert "was not prepared here; there are actor, critic" in found[6]


@pytest.mark.slow
@pytest.mark.parametrize("options", STRATEGIES[:2])
def test_frozen_models_come_and_go_one_at_a_time(options: str) -> None:
    """R56 and R57: whoever shards what trains."""
    for found in run_ranks(reloaded, 2, options, timeout_s=120):
        with_reference = ["actor", "critic", "reference"]
        assert found[0] == with_reference
        assert found[1] == "reference is in use; one at a time"
        assert found[2] == with_reference, "another one did not bring it, and cannot take it away"
        assert found[3:5] == [["actor", "critic"], ["actor", "critic", "other"]]
        assert "a Linear that was not prepared here" in found[5]


@pytest.mark.slow
@pytest.mark.parametrize("options", STRATEGIES)
def test_setting_up_syncs_with_the_actor_if_there_is_one(options: str) -> None:
    """R6, R12: engine and actor are two objects, and only a sync makes them say the same."""
    for facts in run_ranks(set_up, 2, options, timeout_s=120):
        for name in ("with", "without"):
            assert facts[f"{name} an actor: engine"] == ("HFInferenceEngine", True), "the type that was passed"
            assert facts[f"{name} an actor: status"] == "SLEEPED"
        assert facts["with an actor: first"] == facts["with an actor: synced"] == facts["without an actor: synced"]
        assert facts["without an actor: first"] != facts["without an actor: synced"]
        assert "late comes too late" in facts["late"]


@pytest.mark.slow
def test_what_cannot_be_set_up() -> None:
    nowhere, sleepless, other, unknown = run_ranks(not_set_up, 1, timeout_s=120)[0]
    assert "pass one, or --pretrain" in nowhere
    assert "pass the actor" in sleepless
    assert "--engine_args is for vllm and sglang" in other
    assert "no engine 'x'" in unknown


@pytest.mark.slow
def test_how_many_ranks_share_a_copy_is_said_by_the_caller() -> None:
    """R72: a trainer was seen to take 8 for every reward model."""
    for found in run_ranks(sharded, 2, timeout_s=120):
        assert found["False -1"] == ((2, 1), "OffloadPolicy", False), "as --initial_model_shard_size says"
        assert found["False 1"] == ((2, 1), "OffloadPolicy", False)
        assert found["False 2"] == ((2,), "OffloadPolicy", False)
        assert found["True -1"] == ((2,), "CPUOffloadPolicy", True)
        assert found["True 1"] == ((2, 1), "CPUOffloadPolicy", True)
        assert "each 3 ranks: no divisor of 2" in found["3"]
        assert "call prepare" in found["deepspeed"]
