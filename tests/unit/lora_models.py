"""Modules under every kind of LoRA that can be merged, random enough that each factor counts."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D


class Zoo(nn.Module):
    """One layer of each kind; sizes are odd, so that shards are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.dense = nn.Linear(8, 10)
        self.wide = nn.Linear(10, 7, bias=False)
        self.gpt = Conv1D(6, 7)
        self.image = nn.Conv2d(3, 5, 3)
        self.point = nn.Conv2d(5, 3, 1)
        self.line = nn.Conv1d(3, 4, 2)
        self.head = nn.Linear(6, 9)
        self.stack = Stack()
        self.register_buffer("scale", torch.rand(3))


class Stack(nn.Module):
    """Experts stacked in two parameters, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 6, 5))
        self.down = nn.Parameter(torch.randn(3, 5, 6))


LAYERS = ["table", "dense", "wide", "image", "point", "line"]


def config(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": LAYERS, **options})


def randomised(model: Any, seed: int, scale: float = 1.0) -> Any:
    """Every float parameter moved by random values, also factors that PEFT begins at zero."""
    bits = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=bits).to(parameter.dtype))
    return model


def _two_adapters() -> Any:
    model: Any = get_peft_model(Zoo(), config())
    model.add_adapter("other", config(r=2, lora_alpha=7, target_modules=["dense", "gpt"], fan_in_fan_out=True))
    model.base_model.set_adapter(["default", "other"])
    return model


def _scaled() -> Any:
    model: Any = get_peft_model(Zoo(), config())
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("default", 0.3)
    return model


MERGEABLE: dict[str, Callable[[], Any]] = {
    "plain": lambda: get_peft_model(Zoo(), config()),
    "rslora": lambda: get_peft_model(Zoo(), config(use_rslora=True)),
    "patterns": lambda: get_peft_model(Zoo(), config(rank_pattern={"dense": 2, "image": 6}, alpha_pattern={"wide": 9})),
    "fan in, fan out": lambda: get_peft_model(Zoo(), config(target_modules=["gpt"], fan_in_fan_out=True)),
    "bias": lambda: get_peft_model(Zoo(), config(target_modules=["dense", "image"], lora_bias=True)),
    "dora": lambda: get_peft_model(Zoo(), config(use_dora=True)),
    "dora fan in": lambda: get_peft_model(Zoo(), config(target_modules=["gpt"], fan_in_fan_out=True, use_dora=True)),
    "modules to save": lambda: get_peft_model(Zoo(), config(modules_to_save=["head", "stack"])),
    "trained biases": lambda: get_peft_model(Zoo(), config(bias="all")),
    "stacked parameters": lambda: get_peft_model(
        Zoo(), config(target_modules=["dense"], target_parameters=["stack.up", "stack.down"])
    ),
    "two adapters": _two_adapters,
    "set_scale": _scaled,
}


def merged(model: Any) -> dict[str, torch.Tensor]:
    """What PEFT's own merge leaves of a copy, by name."""
    done = copy.deepcopy(model).merge_and_unload()
    return {name: tensor.detach() for name, tensor in done.state_dict().items()}
