"""Shapes from configurations, beside the modules that transformers makes of them on the meta device."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.planner_settings import NUMEL, TINY
from wsync.bench.cases import CASES
from wsync.errors import ConfigError
from wsync.planner import named, read_config
from wsync.planner.hf_config import model_of
from wsync.planner.models import NAMES

MOE: Mapping[str, Any] = {
    **TINY,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 4,
    "head_dim": 16,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama tied": TINY,
    "llama untied": {**TINY, "tie_word_embeddings": False},
    "llama biases": {**TINY, "attention_bias": True, "mlp_bias": True},
    "llama one KV head, wide heads": {**TINY, "num_key_value_heads": 1, "head_dim": 48},
    "llama every head has its own": {**TINY, "num_key_value_heads": None},
    "mistral": {**TINY, "model_type": "mistral"},
    "qwen2": {**TINY, "model_type": "qwen2"},
    "qwen3": {**TINY, "model_type": "qwen3", "head_dim": 32},
    "qwen3 biases": {**TINY, "model_type": "qwen3", "head_dim": 32, "attention_bias": True},
    "mixtral": {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2 moe": {**MOE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 56},
    "qwen2 moe no biases": {
        **MOE,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 56,
        "qkv_bias": False,
    },
    "qwen3 moe": {**MOE, "model_type": "qwen3_moe"},
    "qwen3 moe some dense": {**MOE, "model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [1]},
}


def in_transformers(config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        module: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return module


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name: str) -> None:
    config = dict(CONFIGS[name])
    module = in_transformers(AutoConfig.for_model(config.pop("model_type"), **config))
    wanted = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    model = model_of(name, CONFIGS[name])
    assert model.numel == sum(parameter.numel() for parameter in module.parameters())
    assert sorted(model.trained_shapes.values()) == sorted(wanted.values())
    if "mixtral" not in name:  # its experts are called otherwise
        assert dict(model.trained_shapes) == wanted


@pytest.mark.parametrize("name", ["llama tied", "qwen2 moe", "qwen3 moe some dense", "mixtral", "qwen3"])
def test_files_that_transformers_writes(name: str, tmp_path: Path) -> None:
    config = dict(CONFIGS[name])
    AutoConfig.for_model(config.pop("model_type"), **config).save_pretrained(tmp_path)
    wanted = model_of(name, CONFIGS[name])
    for path in (tmp_path, tmp_path / "config.json"):
        found = read_config(path)
        assert found.name == tmp_path.name
        assert found.shapes == wanted.shapes
        assert (found.head_dim, found.experts_per_token) == (wanted.head_dim, wanted.experts_per_token)


def test_the_tiny_model_of_these_tests() -> None:
    assert model_of("tiny", TINY).numel == NUMEL


@pytest.mark.parametrize(
    ("name", "numel", "head_dim", "heads", "kv_heads"),
    [
        ("0.5b", 494_032_768, 64, 14, 2),
        ("1.5b", 1_543_714_304, 128, 12, 2),
        ("7b", 7_615_616_512, 128, 28, 4),
        ("llama-8b", 8_030_261_248, 128, 32, 8),
        ("14b", 14_770_033_664, 128, 40, 8),
        ("32b", 32_763_876_352, 128, 40, 8),
        ("72b", 72_706_203_648, 128, 64, 8),
        ("moe-8b", 8_099_779_584, 128, 32, 4),
        ("moe-30b-a3b", 30_532_122_624, 128, 32, 4),
    ],
)
def test_models_that_have_names(name: str, numel: int, head_dim: int, heads: int, kv_heads: int) -> None:
    """Sizes are those that the publishers give, and for two of the bench's those of the bench."""
    model = named(name)
    assert (model.numel, model.head_dim, model.heads, model.kv_heads) == (numel, head_dim, heads, kv_heads)


def test_every_name_is_tested() -> None:
    [marks] = [mark for mark in test_models_that_have_names.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    assert {case[0] for case in marks.args[1]} == set(NAMES)


@pytest.mark.parametrize(("name", "case"), [("0.5b", "dense-0.5b"), ("7b", "dense-7b"), ("moe-8b", "moe")])
def test_the_bench_has_the_same_models(name: str, case: str) -> None:
    assert named(name).shapes == CASES[case].shapes(1.0)


def test_the_benchs_mixture_is_a_shorter_published_one() -> None:
    short, full = named("moe-8b"), named("moe-30b-a3b")
    assert short.shapes.items() <= full.shapes.items()
    assert short.widths == full.widths[:12]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot read .*config.json"),
        ("[]", "no JSON object"),
        ("{}", "model_type is None; what is known here is llama, mistral"),
        (json.dumps({**TINY, "model_type": "gpt2"}), "model_type is 'gpt2'"),
        (json.dumps({**TINY, "hidden_size": None}), "hidden_size is None; it must be a whole number"),
        (json.dumps({**TINY, "vocab_size": 0}), "vocab_size is 0"),
        (json.dumps({**TINY, "num_hidden_layers": "2"}), "num_hidden_layers is '2'"),
        (json.dumps({**TINY, "num_hidden_layers": True}), "num_hidden_layers is True"),
        (json.dumps({**TINY, "quantization_config": {"bits": 4}}), "the weights are quantised"),
        (json.dumps({**TINY, "model_type": "qwen3_moe"}), "num_experts is None"),
    ],
)
def test_files_that_are_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        read_config(tmp_path)
    assert str(file) in str(raised.value)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path)


def test_a_name_that_nobody_has() -> None:
    with pytest.raises(ConfigError, match=r"there is no model '8b'; choose from 0\.5b, 7b, "):
        named("8b")
