"""Models of the shapes that people train, with random weights that are made on the device in seconds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wsync.errors import ConfigError

DENSE, MOE = "dense-7b", "moe"
SHAPES = (DENSE, MOE)


def config_of(shape: str, dtype: torch.dtype, *, small: bool = False, layers: int | None = None) -> Any:
    """A transformers configuration: `DENSE` is Qwen2 with 339 tensors, `MOE` is Qwen3-MoE with 4,719 for an engine.

    `small` keeps the kinds of layers and takes two of each; `layers` takes another number of them.
    """
    from transformers import Qwen2Config, Qwen3MoeConfig

    common = {
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
    }
    if shape == DENSE:
        return Qwen2Config(
            architectures=["Qwen2ForCausalLM"],
            vocab_size=2048 if small else 152064,
            hidden_size=256 if small else 3584,
            intermediate_size=512 if small else 18944,
            num_hidden_layers=layers or (2 if small else 28),
            num_attention_heads=4 if small else 28,
            num_key_value_heads=2 if small else 4,
            **common,
        )
    if shape == MOE:
        return Qwen3MoeConfig(
            architectures=["Qwen3MoeForCausalLM"],
            vocab_size=2048 if small else 151936,
            hidden_size=256 if small else 2048,
            moe_intermediate_size=128 if small else 768,
            intermediate_size=512 if small else 6144,
            num_hidden_layers=layers or (2 if small else 12),
            num_attention_heads=4 if small else 32,
            num_key_value_heads=2 if small else 4,
            head_dim=64 if small else 128,
            num_experts=8 if small else 128,
            num_experts_per_tok=2 if small else 8,
            **common,
        )
    raise ConfigError(f"unknown shape {shape!r}; choose from {', '.join(SHAPES)}")


def make_folder(config: Any, folder: Path) -> Path:
    """A checkpoint folder without weights, for engines that start with their own random ones."""
    config.save_pretrained(folder)
    return folder


def make_actor(config: Any, dtype: torch.dtype, seed: int, device: str = "cuda") -> nn.Module:
    """A model on `device`, weights by `randomize`."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device=device).eval()
    _restore_buffers(model, config)
    randomize(model, seed)
    return model


@torch.no_grad()
def randomize(model: Any, seed: int) -> None:
    """New weights in place, such that the most likely token is so by far and another one for every seed.

    Engines compute with other kernels than transformers. With weights that leave the choice between tokens to the last
    bit, bf16 models would disagree on equal weights.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            low, high = (-0.1, 0.1) if name.endswith("bias") else (0.8, 1.2)
            parameter.uniform_(low, high, generator=generator)
        else:
            scale = 0.1 if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")) else 1.0
            parameter.normal_(0, scale * parameter.shape[-1] ** -0.5, generator=generator)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding.normal_(0, 1, generator=generator)
    successor = torch.randperm(len(embedding), generator=generator, device=model.device)
    head[successor] = embedding


def engine_side(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights as checkpoints name them: experts, which transformers stacks, one by one."""
    for name, parameter in model.named_parameters():
        stem, _, kind = name.rpartition(".experts.")
        if not stem:
            yield name, parameter.detach()
            continue
        for expert, weight in enumerate(parameter.detach()):
            parts = {"gate_proj": weight[: len(weight) // 2], "up_proj": weight[len(weight) // 2 :]}
            for part, tensor in (parts if kind == "gate_up_proj" else {"down_proj": weight}).items():
                yield f"{stem}.experts.{expert}.{part}.weight", tensor


def greedy(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """What transformers answers."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        made = model.generate(ids, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        answers.append([int(token) for token in made[0, len(prompt) :]])
    return answers


def _restore_buffers(model: Any, config: Any) -> None:
    """Rotary frequencies come from no weights: compute them again, as the model does when it is made."""
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            made = type(module)(config=config).to(module.inv_freq.device)
            module.inv_freq.data.copy_(made.inv_freq)
            module.original_inv_freq = module.inv_freq
