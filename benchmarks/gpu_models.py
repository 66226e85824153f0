"""Shapes of models that people train, with random weights, made on the device in seconds."""

from typing import Any

import torch
from torch import nn

DENSE = "dense 7B"
MOE = "MoE 128 experts"


def config_of(shape: str, *, small: bool = False) -> Any:
    """A transformers configuration: `DENSE` is Qwen2 with 339 tensors, `MOE` is Qwen3-MoE with 4,719.

    `small` keeps the kinds of layers and takes two of each.
    """
    from transformers import Qwen2Config, Qwen3MoeConfig

    common = {"max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None}
    if shape == DENSE:
        return Qwen2Config(
            vocab_size=2048 if small else 152064,
            hidden_size=256 if small else 3584,
            intermediate_size=512 if small else 18944,
            num_hidden_layers=2 if small else 28,
            num_attention_heads=4 if small else 28,
            num_key_value_heads=2 if small else 4,
            **common,
        )
    return Qwen3MoeConfig(
        vocab_size=2048 if small else 151936,
        hidden_size=256 if small else 2048,
        moe_intermediate_size=128 if small else 768,
        intermediate_size=512 if small else 6144,
        num_hidden_layers=2 if small else 12,
        num_attention_heads=4 if small else 32,
        num_key_value_heads=2 if small else 4,
        head_dim=64 if small else 128,
        num_experts=8 if small else 128,
        num_experts_per_tok=2 if small else 8,
        **common,
    )


def random_model(config: Any, dtype: torch.dtype, device: str, seed: int) -> nn.Module:
    """A model with weights of a size that keeps activations in range, and generate as transformers has it."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                low, high = (-0.1, 0.1) if name.endswith("bias") else (0.8, 1.2)
                parameter.uniform_(low, high, generator=generator)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    restore_buffers(model, config, device)
    return model


def restore_buffers(model: Any, config: Any, device: str) -> None:
    """Rotary frequencies have no weights to come from: compute them again, as the model does when it is made."""
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            made = type(module)(config=config, device=device)
            module.inv_freq.data.copy_(made.inv_freq)
            module.original_inv_freq = module.inv_freq
