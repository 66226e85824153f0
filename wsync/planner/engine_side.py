"""What one worker of an engine takes: its part of the weights, and the KV cache."""

import math
from dataclasses import dataclass

from wsync.planner.activations import engine_activations
from wsync.planner.model import Model, ceil_div
from wsync.planner.setting import Setting

_VOCAB_PADDING = 64
"""Engines round the vocabulary up to a multiple of this."""

_SPLIT_OUTPUTS = ("q_proj", "gate_proj", "up_proj")
_SPLIT_INPUTS = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSide:
    """Bytes on the GPU with the most."""

    weights: int
    kv_cache: int
    """0 if weights and activations take all that `Setting.kv_fraction` allows."""

    activations: int
    kv_lacks: int
    """How much more the engine must have before there is any KV cache; 0 if there is one."""


def engine_side(setting: Setting) -> EngineSide:
    """What one worker takes."""
    weights = worker_numel(setting.model, setting.tp) * setting.engine_dtype.itemsize
    activations = engine_activations(setting)
    cache, lacks = setting.kv_bytes, 0
    if setting.kv_fraction is not None:
        left = int(setting.kv_fraction * setting.gpu_bytes) - weights - activations
        cache, lacks = max(left, 0), max(1 - left, 0)
    return EngineSide(weights=weights, kv_cache=cache or 0, activations=activations, kv_lacks=lacks)


def worker_numel(model: Model, tp: int) -> int:
    """Elements of one of `tp` workers: heads, vocabulary and MLPs are split, KV heads at most one by one."""
    return sum(math.prod(_worker_shape(model, name, shape, tp)) for name, shape in model.shapes.items())


def kv_bytes_per_token(setting: Setting) -> int:
    """Bytes that one token takes in the cache of one worker."""
    kv_heads = ceil_div(setting.model.kv_heads, setting.tp)
    return len(setting.model.widths) * 2 * kv_heads * setting.model.head_dim * setting.engine_dtype.itemsize


def _worker_shape(model: Model, name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    layer, _, kind = name.rpartition(".")
    own = layer.rpartition(".")[2]
    if own in ("embed_tokens", "lm_head"):
        return (ceil_div(_VOCAB_PADDING * ceil_div(shape[0], _VOCAB_PADDING), tp), *shape[1:])
    if own in ("k_proj", "v_proj"):
        return (ceil_div(model.kv_heads, tp) * model.head_dim, *shape[1:])
    if own in _SPLIT_OUTPUTS:
        return (shape[0] // tp, *shape[1:])
    if f"{own}.{kind}" in _SPLIT_INPUTS:
        return (shape[0], shape[1] // tp)
    return shape
