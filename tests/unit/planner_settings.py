"""Small models and settings for tests of the planner."""

from collections.abc import Mapping
from typing import Any

from wsync.planner import Setting
from wsync.planner.hf_config import model_of

GIB = 1 << 30

TINY: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "tie_word_embeddings": True,
}
"""16 elements a head. A layer has 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64 = 30,848 parameters."""

LAYER = 30_848
NUMEL = 256 * 64 + 2 * LAYER + 64


def setting(config: Mapping[str, Any] = TINY, **changes: Any) -> Setting:
    """Two GPUs and the tiny model, for which `changes` are made."""
    given = {"kv_bytes": GIB, "gpus": 2, "ranks": 2, "tp": 1, "gpu_bytes": 80 * GIB}
    if "kv_fraction" in changes:
        del given["kv_bytes"]
    return Setting(model=model_of("tiny", config), **{**given, **changes})
