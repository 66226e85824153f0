"""Predictions beside numbers that were worked out by hand."""

import math
from collections.abc import Mapping
from typing import Any, get_args

import pytest
import torch

from tests.unit.planner_settings import GIB, LAYER, NUMEL, TINY, setting
from wsync import registry
from wsync.errors import ConfigError
from wsync.planner import PhasePlan, Setting, judge, named, predict, predict_host, predict_moves
from wsync.planner.engine_side import kv_bytes_per_token
from wsync.planner.hf_config import model_of
from wsync.planner.phases import ENGINE_WEIGHTS, KV_CACHE
from wsync.planner.setting import Transport
from wsync.sleep import SLEEP_TAGS

BF16 = torch.bfloat16
MODEL_7B = 7_615_616_512
CONTEXT = 614 << 20


def plans(given: Setting) -> Mapping[str, PhasePlan]:
    return {plan.name: plan for plan in predict(given)}


def in_training(given: Setting) -> Mapping[str, int]:
    return plans(given)["train"].residents


def test_a_7b_under_fsdp2_by_hand() -> None:
    """Two H200s: fp32 shards, bf16 engine over both GPUs. Every size of Qwen2-7B is even, so that halves are halves."""
    given = Setting(model=named("7b"), gpus=2, ranks=2, tp=2, gpu_bytes=140 * GIB, kv_fraction=0.6)
    norms_and_biases = 28 * (2 * 3584) + 3584  # whole on every worker; biases of q, k and v are split
    worker = (MODEL_7B - norms_and_biases) // 2 + norms_and_biases
    layer = 3584 * (2 * 3584 + 2 * 512 + 3 * 18944) + 3584 + 2 * 512 + 2 * 3584
    outside = 2 * 152064 * 3584 + 3584
    engine_step = 8192 * 2 * (4 * 3584 + 2 * 3584 + 2 * 512 + 4 * 18944) + 1024 * 152064 * 10
    shared = {"CUDA contexts": 2 * CONTEXT}
    peers = {"peer contexts": CONTEXT}
    engine = {
        "engine weights": 2 * worker,
        "engine kv_cache": int(0.6 * 140 * GIB) - 2 * worker - engine_step,
        "engine activations": engine_step,
    }
    found = plans(given)
    assert found["launch"].residents == {**shared, **engine}
    assert found["rollout"].residents == {**shared, **peers, **engine}
    assert found["sync"].residents == {
        **shared,
        **peers,
        "staging": 2 << 30,
        "actor": 2 * MODEL_7B,
        "engine weights": 2 * worker,
    }
    assert found["train"].residents == {
        **shared,
        **peers,
        "actor": 2 * MODEL_7B,
        "optimizer": 4 * MODEL_7B,
        "gradients": 2 * MODEL_7B,
        "gathered layers": 2 * 2 * (outside + 2 * layer),
        "activations": 4096 * (2 * (28 * 3584 + 4 * 3584 + 2 * 3584 + 2 * 512 + 4 * 18944) + 152064 * 10),
    }
    assert predict_host(given) == {"actor": 4 * MODEL_7B, "optimizer": 8 * MODEL_7B}


@pytest.mark.parametrize(
    ("trainer", "dtype", "actor", "gradients", "optimizer"),
    [
        ("plain", torch.float32, 4 * NUMEL, 4 * NUMEL, 8 * NUMEL),
        ("plain", BF16, 2 * NUMEL, 2 * NUMEL, 8 * NUMEL),
        ("fsdp2", torch.float32, 2 * NUMEL, 2 * NUMEL, 4 * NUMEL),
        ("fsdp1", BF16, NUMEL, NUMEL, 4 * NUMEL),
        ("zero1", BF16, 2 * NUMEL, 2 * NUMEL, 6 * NUMEL),
        ("zero2", BF16, 2 * NUMEL, NUMEL, 6 * NUMEL),
        ("zero3", BF16, NUMEL, NUMEL, 6 * NUMEL),
        ("zero3", torch.float32, 2 * NUMEL, 2 * NUMEL, 6 * NUMEL),
    ],
)
def test_what_each_trainer_shards(trainer: str, dtype: torch.dtype, actor: int, gradients: int, optimizer: int) -> None:
    found = in_training(setting(trainer=trainer, actor_dtype=dtype))
    assert (found["actor"], found["gradients"], found["optimizer"]) == (actor, gradients, optimizer)
    assert ("reduce bucket" in found) == trainer.startswith("zero")


def test_uneven_shards_are_rounded_up_where_each_trainer_cuts() -> None:
    """Over 3 ranks: FSDP2 rows of each tensor, ZeRO-3 elements of each tensor, FSDP1 elements of each layer."""
    by_hand = {
        "fsdp2": 86 * 64 + 22 + 2 * (22 * 64 * 2 + 11 * 64 * 2 + 32 * 64 * 2 + 22 * 96 + 22 * 2),
        "zero3": 5462 + 22 + 2 * (2 * 1366 + 2 * 683 + 3 * 2048 + 2 * 22),
        "fsdp1": -(-(256 * 64 + 64) // 3) + 2 * -(-LAYER // 3),
    }
    for trainer, numel in by_hand.items():
        assert in_training(setting(trainer=trainer, gpus=3, ranks=3))["actor"] == 4 * numel
        assert numel >= NUMEL / 3


def test_optimizers_and_master_copies() -> None:
    assert in_training(setting(trainer="plain", master=True))["optimizer"] == 12 * NUMEL
    assert "optimizer" not in in_training(setting(trainer="plain", optimizer="sgd"))
    assert in_training(setting(trainer="zero1", ranks=1, optimizer="sgd"))["optimizer"] == 4 * NUMEL
    assert in_training(setting(trainer="zero3", master=False))["optimizer"] == 4 * NUMEL
    assert in_training(setting(trainer="plain", state_dtype=BF16))["optimizer"] == 4 * NUMEL
    assert in_training(setting(trainer="plain", state_dtype=BF16, master=True))["optimizer"] == 8 * NUMEL


def test_only_factors_train_under_lora() -> None:
    factors = 2 * 8 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 96))
    found = in_training(setting(trainer="plain", lora_rank=8, actor_dtype=BF16))
    assert found["actor"] == 2 * NUMEL + 4 * factors
    assert found["gradients"] == 4 * factors
    assert found["optimizer"] == 8 * factors
    whole = plans(setting(trainer="plain", lora_rank=8))["sync"].residents["LoRA merge"]
    linear = NUMEL - 256 * 64 - 5 * 64
    assert whole == 4 * (linear + 64 * 96)
    sharded = plans(setting(trainer="zero3", lora_rank=8))["sync"].residents["LoRA merge"]
    assert sharded == 4 * ((linear + 64 * 96) // 2 + factors)


def test_an_engine_repeats_kv_heads_and_pads_the_vocabulary() -> None:
    config = {**TINY, "vocab_size": 250, "num_hidden_layers": 1}
    norms = 3 * 64
    for tp, kv_heads in ((1, 2), (2, 1), (4, 1)):
        own = 256 // tp * 64 + 2 * (64 // tp) * 64 + 2 * (16 * kv_heads) * 64 + 3 * (96 // tp) * 64 + norms
        given = setting(config, gpus=4, ranks=1, tp=tp)
        assert plans(given)["sync"].residents["engine weights"] == 2 * own
        assert kv_bytes_per_token(given) == 2 * kv_heads * 16 * 2


def test_slots_are_there_unless_the_engine_reads_the_trainers_own_memory() -> None:
    for given, slots in (
        (setting(bucket_bytes=8192, path="buckets"), 2 * 8192),
        (setting(bucket_bytes=8192, gpus_per_node=1), 2 * 8192),
        (setting(bucket_bytes=8192, num_slots=3, path="buckets"), 3 * 8192),
        (setting(bucket_bytes=8192, transport="inproc", ranks=1, path="buckets"), 2 * 8192),
        (setting(bucket_bytes=8192), None),
        (setting(bucket_bytes=8192, trainer="zero1"), None),
        (setting(bucket_bytes=8192, transport="inproc", ranks=1), None),
        (setting(bucket_bytes=8192, transport="inproc", ranks=1, lora_rank=2), 2 * 8192),
        (setting(num_slots=1, path="buckets"), 2 * NUMEL + 5 * 128),  # norms begin at multiples of 256 bytes
    ):
        assert plans(given)["sync"].residents.get("slots") == slots
        assert not any("slots" in plans(given)[phase].residents for phase in ("launch", "rollout", "train"))


def test_what_is_pulled_is_cast_first_where_it_crosses_to_another_gpu() -> None:
    linear = NUMEL - 256 * 64 - 5 * 64
    for given, staging in (
        (setting(), NUMEL),  # half of it, in bf16
        (setting(staging_bytes=1000), 1000),
        (setting(staging_bytes=0), None),
        (setting(actor_dtype=BF16), None),
        (setting(gpus=1, ranks=1, path="pull"), None),
        (setting(trainer="zero2"), None),  # one of two whole copies is on the worker's own GPU
        (setting(trainer="zero2", path="pull"), 2 * NUMEL),  # at most: as if it were not
        (setting(lora_rank=2), NUMEL - linear),  # what is merged travels
    ):
        assert plans(given)["sync"].residents.get("staging") == staging
        assert not any("staging" in plans(given)[phase].residents for phase in ("launch", "rollout", "train"))


def test_workers_have_contexts_on_the_gpus_that_they_read() -> None:
    for given, peers in (
        (setting(gpus=4, ranks=4), 3),
        (setting(gpus=4, ranks=4, tp=4, trainer="zero1"), 3),
        (setting(gpus=4, ranks=4, tp=2, trainer="zero1"), 1),
        (setting(gpus=4, ranks=4, trainer="zero1"), 0),
        (setting(gpus=4, ranks=4, path="buckets"), 0),
    ):
        for phase, plan in plans(given).items():
            assert plan.residents.get("peer contexts", 0) == (phase != "launch") * peers * CONTEXT


def test_a_pull_is_within_one_node() -> None:
    with pytest.raises(ConfigError, match="path is 'pull', which is within one node; gpus is 2"):
        setting(path="pull", gpus_per_node=1)


@pytest.mark.parametrize("name", get_args(Transport))
def test_one_ring_of_slots_is_all_there_can_be(name: str) -> None:
    """Senders that take turns would have one each."""
    assert not getattr(registry.transport(name), "in_turns", False)


def test_processes_and_graphs_are_there_all_the_time() -> None:
    for transport, processes in (("inproc", 1), ("cuda_ipc", 2)):
        for plan in predict(setting(transport=transport, context_bytes=700, cuda_graph_bytes=30)):
            assert plan.residents["CUDA contexts"] == processes * 700
            assert plan.residents["engine CUDA graphs"] == 30


def test_what_is_given_is_not_estimated() -> None:
    given = setting(activations=5, engine_activations=7, kv_bytes=11)
    assert plans(given)["train"].residents["activations"] == 5
    assert plans(given)["rollout"].residents["engine activations"] == 7
    assert plans(given)["rollout"].residents["engine kv_cache"] == 11


def test_checkpointing_keeps_the_inputs_of_layers() -> None:
    layer = 4 * 64 + 2 * 64 + 2 * 32 + 4 * 96
    tokens = 3 * 100
    ends = 256 * (2 + 8)
    for checkpointing, elements in ((False, 2 * layer), (True, 2 * 64 + layer)):
        given = setting(micro_batch=3, sequence=100, checkpointing=checkpointing)
        assert in_training(given)["activations"] == tokens * (2 * elements + ends)


def test_a_token_goes_through_some_experts() -> None:
    moe = {
        **TINY,
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
    }
    assert [width.inter for width in model_of("moe", moe).widths] == [96, 2 * 32 + 48]
    stacked = model_of("moe", moe).trained_shapes
    assert stacked["model.layers.1.mlp.experts.gate_up_proj"] == (6, 64, 64)
    assert stacked["model.layers.1.mlp.experts.down_proj"] == (6, 64, 32)
    assert sum("experts" in name for name in stacked) == 2


@pytest.mark.parametrize("trainer", ["plain", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("transport", ["inproc", "cuda_ipc"])
def test_an_offloaded_actor_is_never_beside_the_cache(trainer: str, lora_rank: int, transport: str) -> None:
    given = setting(trainer=trainer, lora_rank=lora_rank, transport=transport)
    for plan in (*predict(given), *predict_moves(given)):
        assert plan.peak == sum(plan.residents.values())
        assert not {"actor", "engine kv_cache"} <= set(plan.residents)
        assert all(plan.residents.values())


def test_steps_between_phases_in_order() -> None:
    steps = {plan.name: set(plan.residents) for plan in predict_moves(setting())}
    assert list(steps) == [
        "offload optimizer",
        "wake weights",
        "sync",
        "offload actor",
        "empty cache",
        "wake kv_cache",
        "sleep",
        "reload actor",
        "reload optimizer",
    ]
    always = {"CUDA contexts", "peer contexts"}
    assert steps["offload optimizer"] == steps["reload optimizer"] == {*always, "actor", "optimizer"}
    assert steps["offload actor"] == {*always, "actor", "engine weights"}
    assert steps["sync"] == {*steps["offload actor"], "staging"}
    assert steps["empty cache"] == {*always, "engine weights", "allocator's cache"}
    assert steps["wake kv_cache"] == {*always, "engine weights", "engine kv_cache"}
    cached = next(plan for plan in predict_moves(setting()) if plan.name == "empty cache")
    assert cached.residents["allocator's cache"] == 2 * NUMEL


def test_what_is_not_offloaded_stays() -> None:
    given = setting(offload=frozenset({"optimizer"}))
    assert plans(given)["rollout"].residents["actor"] == 2 * NUMEL
    assert [plan.name for plan in predict_moves(given)] == [
        *("offload optimizer", "wake weights", "sync", "wake kv_cache", "sleep", "reload optimizer")
    ]
    assert predict_host(given) == {"optimizer": 8 * NUMEL}
    given = setting(offload=frozenset({"actor"}))
    assert plans(given)["rollout"].residents["optimizer"] == 4 * NUMEL
    assert predict_host(given) == {"actor": 4 * NUMEL}
    assert predict_host(setting(offload=frozenset(), sleep_level=1)) == {"engine weights": 2 * 2 * NUMEL}


def test_zero3_keeps_its_gradients_beside_its_weights() -> None:
    given = setting(trainer="zero3", reduce_bucket=1000)
    sync = plans(given)["sync"].residents
    assert (sync["gradients"], sync["reduce bucket"]) == (2 * NUMEL, 4000)
    assert "gradients" not in plans(given)["rollout"].residents
    assert predict_host(given)["actor"] == 2 * (4 * NUMEL + 4000)
    assert "gradients" not in plans(setting(trainer="zero2"))["sync"].residents


def test_host_memory_is_of_the_fullest_node() -> None:
    given = setting(trainer="plain", gpus=12, ranks=1, gpus_per_node=4, sleep_level=1)
    assert predict_host(given) == {"actor": 16 * NUMEL, "optimizer": 32 * NUMEL, "engine weights": 8 * NUMEL}


def test_a_phase_that_does_not_fit_says_what_would_help() -> None:
    given = Setting(model=named("7b"), gpus=2, ranks=2, tp=2, gpu_bytes=64 * GIB, kv_bytes=60 * GIB)
    verdicts = {verdict.plan.name: verdict for verdict in judge(given)}
    assert [name for name, verdict in verdicts.items() if verdict.fits] == ["sync"]
    missing = verdicts["rollout"].plan.peak - 64 * GIB
    assert verdicts["rollout"].left == -missing
    assert verdicts["rollout"].plan.largest == "engine kv_cache"
    assert verdicts["rollout"].changes[0] == f"a KV cache smaller by {math.ceil(10 * missing / GIB) / 10:.1f} GiB"
    assert verdicts["train"].plan.largest == "optimizer"
    assert "4 ranks that share the actor" in verdicts["train"].changes
    assert verdicts["sync"].changes == []


@pytest.mark.parametrize(
    ("changes", "phase", "change"),
    [
        ({"offload": {"optimizer"}, "gpu_bytes": 30 * GIB, "kv_bytes": 8 * GIB}, "rollout", "offload of the actor"),
        ({"offload": {"actor"}, "gpu_bytes": 40 * GIB, "kv_bytes": 8 * GIB}, "rollout", "offload of the optimizer"),
        ({"trainer": "plain", "gpu_bytes": 100 * GIB}, "train", "fsdp2 in place of plain"),
        ({"gpu_bytes": 90 * GIB, "micro_batch": 4}, "train", "micro-batches of 1 sequence"),
        ({"gpu_bytes": 90 * GIB, "checkpointing": False, "sequence": 8192}, "train", "activation checkpointing"),
        ({"gpu_bytes": 70 * GIB, "sequence": 8192}, "train", "sequences of 2048 tokens"),
        ({"gpu_bytes": 24 * GIB, "kv_fraction": 0.4, "tp": 1}, "rollout", "an engine over 4 workers"),
        ({"gpu_bytes": 80 * GIB, "kv_fraction": 0.2, "tp": 1}, "rollout", "a KV fraction of 0.22"),
        ({"gpu_bytes": 23 * GIB, "bucket_bytes": GIB, "path": "buckets"}, "sync", "buckets of 64.0 MiB"),
        ({"gpu_bytes": 24 * GIB}, "sync", "no staging"),
        ({"gpu_bytes": 20 * GIB, "path": "pull", "gpus_per_node": 4}, "sync", "4 ranks that share the actor"),
    ],
)
def test_single_changes_that_are_enough(changes: Mapping[str, object], phase: str, change: str) -> None:
    given = {"model": named("7b"), "gpus": 2, "ranks": 2, "tp": 2, "kv_bytes": GIB, **changes}
    if "kv_fraction" in changes:
        del given["kv_bytes"]
    [verdict] = [one for one in judge(Setting(**given)) if one.plan.name == phase]  # type: ignore[arg-type]
    assert not verdict.fits
    assert change in verdict.changes


def test_nothing_is_suggested_that_is_not_enough() -> None:
    given = Setting(model=named("72b"), gpus=1, ranks=1, gpu_bytes=GIB, kv_bytes=GIB // 2)
    assert [list(verdict.changes) for verdict in judge(given)] == [[], [], [], []]


def test_no_room_for_a_cache_is_not_a_fit() -> None:
    given = setting(kv_fraction=0.0001, gpu_bytes=80 * GIB)
    verdicts = {verdict.plan.name: verdict for verdict in judge(given)}
    assert "engine kv_cache" not in verdicts["rollout"].plan.residents
    assert not verdicts["launch"].fits
    assert not verdicts["rollout"].fits
    assert verdicts["train"].fits
    assert verdicts["rollout"].changes == ["a KV fraction of 0.01"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer": "fsdp3"}, "trainer is 'fsdp3'; choose from plain, fsdp1"),
        ({"optimizer": "lion"}, "optimizer is 'lion'; choose from adamw, sgd"),
        ({"transport": "shm"}, "transport is 'shm'; choose from inproc, cuda_ipc"),
        ({"sleep_level": 3}, "sleep_level is 3; choose from 1, 2"),
        ({"actor_dtype": torch.int8}, "actor_dtype is torch.int8; choose from torch.float32"),
        ({"offload": {"critic"}}, "offload is 'critic'; choose from actor, optimizer"),
        ({"gpus": 0}, "gpus is 0; it must be at least 1"),
        ({"lora_rank": -1}, "lora_rank is -1; it must be at least 0"),
        ({"activations": -1}, "activations is -1; it must be at least 0"),
        ({"bucket_bytes": 1}, "it must be at least 4096 bytes"),
        ({"gpus": 4, "ranks": 3}, "ranks is 3, which does not divide 4, the gpus"),
        ({"tp": 4}, "tp is 4, which does not divide 2, the gpus"),
        ({"gpus": 3, "ranks": 3, "tp": 3}, "tp is 3, which does not divide 4, the attention heads"),
        ({"kv_bytes": None}, "give the size of the KV cache once"),
        ({"kv_bytes": 0}, "kv_bytes is 0; it must be at least 1"),
        ({"kv_fraction": 1.5}, "kv_fraction is 1.5; it must be above 0"),
    ],
)
def test_settings_that_make_no_sense(changes: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        setting(**changes)


def test_a_cache_that_is_given_twice() -> None:
    with pytest.raises(ConfigError, match="once"):
        Setting(model=named("0.5b"), gpus=1, ranks=1, gpu_bytes=GIB, kv_bytes=1, kv_fraction=0.5)


def test_splits_that_engines_refuse() -> None:
    with pytest.raises(ConfigError, match="tp is 4 and the model has 6 KV heads"):
        setting({**TINY, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 16}, gpus=4, ranks=4, tp=4)
    with pytest.raises(ConfigError, match=r"does not divide 98, the outputs of model.layers.0.mlp.up_proj.weight"):
        setting({**TINY, "intermediate_size": 98}, gpus=4, ranks=4, tp=4)


def test_names_are_those_of_the_residents_of_an_engine() -> None:
    assert [f"engine {tag}" for tag in SLEEP_TAGS] == [ENGINE_WEIGHTS, KV_CACHE]
