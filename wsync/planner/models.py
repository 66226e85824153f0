"""Models by name: those of the bench, and published ones as the entries of their `config.json`."""

from collections.abc import Mapping
from typing import Any

from wsync.bench.cases import CASES
from wsync.errors import ConfigError
from wsync.planner.hf_config import model_of
from wsync.planner.model import Model

_BENCH: Mapping[str, tuple[str, int, int]] = {
    "0.5b": ("dense-0.5b", 64, 0),
    "7b": ("dense-7b", 128, 0),
    "moe-8b": ("moe", 128, 8),
}
"""Name -> case of the bench, size of a head, experts that a token goes through."""


def _qwen2(hidden: int, inter: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


_PUBLISHED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "1.5b": ("Qwen2.5-1.5B", _qwen2(1536, 8960, 28, 12, 2, 151936, True)),
    "llama-8b": (
        "Llama-3.1-8B",
        {**_qwen2(4096, 14336, 32, 32, 8, 128256, False), "model_type": "llama"},
    ),
    "14b": ("Qwen2.5-14B", _qwen2(5120, 13824, 48, 40, 8, 152064, False)),
    "32b": ("Qwen2.5-32B", _qwen2(5120, 27648, 64, 40, 8, 152064, False)),
    "72b": ("Qwen2.5-72B", _qwen2(8192, 29568, 80, 64, 8, 152064, False)),
    "moe-30b-a3b": (
        "Qwen3-30B-A3B",
        {
            **_qwen2(2048, 6144, 48, 32, 4, 151936, False),
            "model_type": "qwen3_moe",
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
        },
    ),
}

NAMES: Mapping[str, str] = {
    **{name: CASES[case].about for name, (case, _, _) in _BENCH.items()},
    **{name: published for name, (published, _) in _PUBLISHED.items()},
}
"""Every name, with what it is."""


def named(name: str) -> Model:
    """The model of that name. Raises `ConfigError` if there is none."""
    if name in _BENCH:
        case, head_dim, experts_per_token = _BENCH[name]
        return Model(name=name, shapes=CASES[case].shapes(1.0), head_dim=head_dim, experts_per_token=experts_per_token)
    if name in _PUBLISHED:
        return model_of(name, _PUBLISHED[name][1])
    raise ConfigError(f"there is no model {name!r}; choose from {', '.join(NAMES)}, or pass the config.json of another")
