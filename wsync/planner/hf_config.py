"""The shapes of a model from the `config.json` of a Hugging Face folder, read as plain JSON."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wsync.errors import ConfigError
from wsync.planner.model import Model

Config = Mapping[str, Any]


def _never(config: Config) -> bool:
    return False


def _attention_bias(config: Config) -> bool:
    return bool(config.get("attention_bias", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Where models of one `model_type` differ from the others."""

    qkv_bias: Callable[[Config], bool] = _never
    o_bias: Callable[[Config], bool] = _never
    mlp_bias: Callable[[Config], bool] = _never
    head_norms: bool = False
    """Norms of queries and keys, of the size of one head."""

    experts: bool = False
    expert_inter: str = "moe_intermediate_size"
    shared_expert: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(
        qkv_bias=_attention_bias, o_bias=_attention_bias, mlp_bias=lambda config: bool(config.get("mlp_bias", False))
    ),
    "mistral": _Family(),
    "mixtral": _Family(experts=True, expert_inter="intermediate_size"),
    "qwen2": _Family(qkv_bias=lambda config: True),
    "qwen2_moe": _Family(qkv_bias=lambda config: bool(config.get("qkv_bias", True)), experts=True, shared_expert=True),
    "qwen3": _Family(qkv_bias=_attention_bias, o_bias=_attention_bias, head_norms=True),
    "qwen3_moe": _Family(qkv_bias=_attention_bias, o_bias=_attention_bias, head_norms=True, experts=True),
}


def read_config(path: Path) -> Model:
    """The model that `path` describes: a `config.json`, or a folder with one.

    Raises `ConfigError` if it cannot be read, or describes what is not known here.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}; pass the config.json of a Hugging Face model") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is no JSON object; pass the config.json of a Hugging Face model")
    try:
        return model_of(file.resolve().parent.name or str(file), config)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def model_of(name: str, config: Config) -> Model:
    """The model that has the entries of `config`. Raises `ConfigError`."""
    family = _FAMILIES.get(str(config.get("model_type")))
    if family is None:
        known = ", ".join(_FAMILIES)
        raise ConfigError(f"model_type is {config.get('model_type')!r}; what is known here is {known}")
    if config.get("quantization_config"):
        raise ConfigError("the weights are quantised; predictions are for weights of 16 bits up")
    hidden, vocab, heads = (_size(config, key) for key in ("hidden_size", "vocab_size", "num_attention_heads"))
    head_dim = hidden // heads if config.get("head_dim") is None else _size(config, "head_dim")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(_size(config, "num_hidden_layers")):
        own = {**_attention(config, family, hidden, heads, head_dim), **_mlp(config, family, hidden, layer)}
        norms = {f"{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"model.layers.{layer}.{key}": shape for key, shape in {**own, **norms}.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    per_token = _size(config, "num_experts_per_tok") if family.experts else 0
    return Model(name=name, shapes=shapes, head_dim=head_dim, experts_per_token=per_token)


def _attention(config: Config, family: _Family, hidden: int, heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    q = heads * head_dim
    kv = q if config.get("num_key_value_heads") is None else _size(config, "num_key_value_heads") * head_dim
    outputs = {"q": q, "k": kv, "v": kv}
    found: dict[str, tuple[int, ...]] = {f"self_attn.{key}_proj.weight": (out, hidden) for key, out in outputs.items()}
    found["self_attn.o_proj.weight"] = (hidden, q)
    if family.qkv_bias(config):
        found |= {f"self_attn.{key}_proj.bias": (out,) for key, out in outputs.items()}
    if family.o_bias(config):
        found["self_attn.o_proj.bias"] = (hidden,)
    if family.head_norms:
        found |= {f"self_attn.{key}_norm.weight": (head_dim,) for key in "qk"}
    return found


def _mlp(config: Config, family: _Family, hidden: int, layer: int) -> dict[str, tuple[int, ...]]:
    sparse = family.experts and layer not in (config.get("mlp_only_layers") or ())
    if not sparse or (layer + 1) % (config.get("decoder_sparse_step") or 1):
        return _block("mlp.", hidden, _size(config, "intermediate_size"), family.mlp_bias(config))
    experts = _size(config, "num_local_experts" if "num_local_experts" in config else "num_experts")
    inter = _size(config, family.expert_inter)
    found: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts, hidden)}
    for expert in range(experts):
        found |= _block(f"mlp.experts.{expert}.", hidden, inter, False)
    if family.shared_expert:
        found |= _block("mlp.shared_expert.", hidden, _size(config, "shared_expert_intermediate_size"), False)
        found["mlp.shared_expert_gate.weight"] = (1, hidden)
    return found


def _block(prefix: str, hidden: int, inter: int, bias: bool) -> dict[str, tuple[int, ...]]:
    outputs = {"gate": inter, "up": inter, "down": hidden}
    found: dict[str, tuple[int, ...]] = {
        f"{prefix}{key}_proj.weight": (out, inter if key == "down" else hidden) for key, out in outputs.items()
    }
    if bias:
        found |= {f"{prefix}{key}_proj.bias": (out,) for key, out in outputs.items()}
    return found


def _size(config: Config, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} is {value!r}; it must be a whole number of at least 1")
    return value
