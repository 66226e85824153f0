"""Tiny random models for the tests of the embedded engine, float32 so that equal weights give equal tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "vocab_size": 128,
}

PROMPTS = [[3, 17, 42, 99, 5], [7, 1], [120, 64, 33]]


def llama(**sizes: Any) -> Any:
    """Untied head."""
    return LlamaForCausalLM(LlamaConfig(**{**_SIZES, "head_dim": 32, **sizes}))


def tied_qwen2() -> Any:
    """The head is the embedding; biases on q, k and v."""
    return Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=True))


def qwen3_moe() -> Any:
    """Experts lie stacked in memory and one by one in checkpoints."""
    sizes = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **sizes))


FAMILIES: dict[str, Callable[[], Any]] = {"llama": llama, "tied qwen2": tied_qwen2, "qwen3 moe": qwen3_moe}


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """`make()` with the weights that belong to `seed`, larger than the defaults: tokens then differ between seeds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def expected_tokens(model: Any, max_new_tokens: int = 12) -> list[list[int]]:
    """What transformers itself generates from `PROMPTS`, one prompt at a time."""
    rows = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        rows.append(output[0, len(prompt) :].tolist())
    return rows


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    """Whether all parameters and buffers are bitwise equal."""
    mine, theirs = ({**dict(model.named_parameters()), **dict(model.named_buffers())} for model in (one, other))
    return mine.keys() == theirs.keys() and all(
        torch.equal(
            mine[name].detach().reshape(-1).view(torch.uint8), theirs[name].detach().reshape(-1).view(torch.uint8)
        )
        for name in mine
    )
