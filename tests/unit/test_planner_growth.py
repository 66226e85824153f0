"""Whatever is larger never makes a prediction smaller."""

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.planner_settings import GIB, TINY, setting
from wsync.planner import Setting, predict, predict_host, predict_moves

MOE = {"model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_key_value_heads")
MOE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
COUNTS = {
    "bucket_bytes": 4096,
    "num_slots": 1,
    "micro_batch": 1,
    "sequence": 1,
    "context_bytes": 1,
    "cuda_graph_bytes": 1,
    "kv_bytes": 1,
    "lora_rank": 1,
    "reduce_bucket": 1,
}

choices: st.SearchStrategy[Mapping[str, Any]] = st.fixed_dictionaries(
    {
        "trainer": st.sampled_from(["plain", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"]),
        "ranks": st.sampled_from([1, 2, 3, 4, 6, 12]),
        "tp": st.sampled_from([1, 2, 4]),
        "transport": st.sampled_from(["inproc", "cuda_ipc"]),
        "sleep_level": st.sampled_from([1, 2]),
        "offload": st.sets(st.sampled_from(["actor", "optimizer"])),
        "checkpointing": st.booleans(),
        "master": st.sampled_from([None, False]),
        "optimizer": st.just("sgd"),
        "lora_rank": st.sampled_from([0, 3]),
        "actor_dtype": st.just(torch.bfloat16),
        "engine_dtype": st.just(torch.bfloat16),
        "bucket_bytes": st.sampled_from([4096, 70_000, 1 << 20]),
        "num_slots": st.integers(1, 3),
        "micro_batch": st.integers(1, 3),
        "sequence": st.integers(1, 99),
        "reduce_bucket": st.integers(1, 9999),
    }
)
configs = st.builds(
    lambda tied, moe, inter: {**TINY, "tie_word_embeddings": tied, "intermediate_size": inter, **(MOE if moe else {})},
    st.booleans(),
    st.booleans(),
    st.integers(1, 40).map(lambda quarter: 4 * quarter),
)


def peaks(one: Setting) -> Mapping[str, int]:
    phases = {plan.name: plan.peak for plan in predict(one)}
    steps = {f"step {number} {plan.name}": plan.peak for number, plan in enumerate(predict_moves(one))}
    host = {f"host {name}": nbytes for name, nbytes in predict_host(one).items()}
    return {**phases, **steps, **host}


def check_grown(less: Setting, more: Setting) -> None:
    before, after = peaks(less), peaks(more)
    shrunk = {name: (nbytes, after.get(name, 0)) for name, nbytes in before.items() if after.get(name, 0) < nbytes}
    assert shrunk == {}


@settings(deadline=None, max_examples=80)
@given(choices, configs, st.data())
def test_a_larger_model(given_choices: Mapping[str, Any], config: Mapping[str, Any], data: st.DataObject) -> None:
    sizes = [*SIZES, *(MOE_SIZES if "num_experts" in config else ())]
    grown = data.draw(st.sampled_from(sizes))
    factor = data.draw(st.integers(2, 3)) if grown != "num_key_value_heads" else 2
    larger = {**config, grown: config[grown] * factor}
    if grown == "hidden_size":
        larger["num_attention_heads"] = config["num_attention_heads"] * factor
    check_grown(setting(config, gpus=12, **given_choices), setting(larger, gpus=12, **given_choices))


@settings(deadline=None, max_examples=80)
@given(choices, configs, st.sampled_from(sorted(COUNTS)), st.integers(1, 5000))
def test_more_of_anything(given_choices: Mapping[str, Any], config: Mapping[str, Any], name: str, more: int) -> None:
    less = {"gpus": 12, "context_bytes": 5, "cuda_graph_bytes": 5, "kv_bytes": GIB, **given_choices}
    if name == "lora_rank":
        less[name] = 3
    check_grown(setting(config, **less), setting(config, **{**less, name: less[name] + more * COUNTS[name]}))


@settings(deadline=None, max_examples=30)
@given(
    choices,
    configs,
    st.sampled_from(
        [
            {"actor_dtype": torch.float32},
            {"engine_dtype": torch.float32},
            {"compute_dtype": torch.float32},
            {"optimizer": "adamw"},
            {"master": True},
        ]
    ),
)
def test_more_precision(given_choices: Mapping[str, Any], config: Mapping[str, Any], change: Mapping[str, Any]) -> None:
    less = {"gpus": 12, "compute_dtype": torch.bfloat16, **given_choices}
    check_grown(setting(config, **less), setting(config, **{**less, **change}))


@settings(deadline=None, max_examples=30)
@given(choices, configs, st.floats(0.001, 0.5), st.integers(1, 80))
def test_a_larger_share_of_a_larger_gpu(
    given_choices: Mapping[str, Any], config: Mapping[str, Any], fraction: float, gib: int
) -> None:
    less = {"gpus": 12, **given_choices}
    base = setting(config, gpu_bytes=gib * GIB, kv_fraction=fraction, **less)
    check_grown(base, setting(config, gpu_bytes=gib * GIB, kv_fraction=2 * fraction, **less))
    check_grown(base, setting(config, gpu_bytes=(gib + 1) * GIB, kv_fraction=fraction, **less))


@settings(deadline=None, max_examples=30)
@given(choices, configs, st.sampled_from([2, 3, 4, 6]), st.sampled_from([2, 3]))
def test_more_ranks_never_cost_more(
    given_choices: Mapping[str, Any], config: Mapping[str, Any], ranks: int, factor: int
) -> None:
    less = {**given_choices, "gpus": 72}
    few, many = (setting(config, **{**less, "ranks": count}) for count in (ranks, factor * ranks))
    check_grown(many, few)
