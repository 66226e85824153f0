"""Tiny models in fp32 and the tokens of transformers for them: `python -m tests.engines.sglang_models DIR`.

For each kind there are weights "a" to "d", as checkpoint folders. `expected.json` has the tokens by folder name. The
engine's own process must not generate them: there, transformers was seen to give other ones.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.engines.vllm_models import build as build_for_vllm
from tests.engines.vllm_models import generate, prompts

KINDS = ("llama", "tied", "bias", "moe")
WEIGHTS = "abcd"

_PARTS: Mapping[str, str] = {
    r"(q|k|v)_proj": "qkv_proj",
    r"(gate|up)_proj": "gate_up_proj",
    r"experts\.\d+\.gate_up_proj\.weight": "experts.w13_weight",
    r"experts\.\d+\.down_proj\.weight": "experts.w2_weight",
}


def build(kind: str, seed: int) -> Any:
    """A random model: Llama with 259 words, Llama with tied embeddings, Qwen2 with biases, Qwen3 with experts."""
    model: Any = build_for_vllm(kind if kind != "tied" else "llama", seed)
    if kind in ("llama", "bias"):
        return model
    if kind == "tied":
        model.config.tie_word_embeddings, model.config.vocab_size = True, 256
    else:
        model.config.moe_intermediate_size = 128  # less than 32 a rank would be padded, up to ranks with padding alone
    model = type(model)(model.config)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter.data, mean=float("norm" in name), std=0.05 if "embed" in name else 0.3)
    return model.float().eval()


def engine_names(folder: Path) -> list[str]:
    """SGLang's names of every parameter of the model in `folder`."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
    for pattern, whole in _PARTS.items():
        names = [re.sub(pattern, whole, name) for name in names]
    return sorted(set(names))


def main(folder: Path) -> None:
    """Write all of it into `folder`."""
    expected = {}
    for kind in KINDS:
        for seed, weights in enumerate(WEIGHTS):
            model = build(kind, seed)
            model.save_pretrained(folder / f"{kind}_{weights}")
            with torch.no_grad():
                expected[f"{kind}_{weights}"] = [generate(model, prompt) for prompt in prompts()]
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
