"""What one rank of a trainer takes: weights, gradients, optimizer, and what it gathers."""

import math
from dataclasses import dataclass

from wsync.bench.cases import Shapes, numel_of
from wsync.planner.model import ceil_div, rows_of, units_of
from wsync.planner.setting import Setting, Trainer

_FP32 = 4
_STATES = {"adamw": 2, "sgd": 0}

_ZERO3_LIVE = 1_000_000_000
"""DeepSpeed's `stage3_max_live_parameters`: how many it has gathered at most."""

_GATHERED_LAYERS = 2
"""Under FSDP: the layer that is computed, and the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSide:
    """Bytes on the GPU of the rank with the most."""

    actor: int
    """Parameters, LoRA factors among them."""

    gradients: int
    optimizer: int
    """States and master copy."""

    gathered: int
    """Layers that are whole for a moment, and their gradients before they are reduced."""

    reduce_bucket: int
    """DeepSpeed's buffer for gradients on their way."""

    gradients_stay: bool
    """Whether gradients and `reduce_bucket` are there whenever the actor is: DeepSpeed's ZeRO-3 makes them once, and
    offloads them with the actor."""


def trainer_side(setting: Setting) -> TrainerSide:
    """What one rank takes."""
    weights = setting.model.trained_shapes
    factors = setting.model.lora_shapes(setting.lora_rank) if setting.lora_rank else {}
    trained, dtype_bytes = (factors, _FP32) if factors else (weights, setting.actor_dtype.itemsize)
    actor = local_numel(weights, setting.trainer, setting.ranks) * setting.actor_dtype.itemsize
    actor += local_numel(factors, setting.trainer, setting.ranks) * _FP32
    split = _stepped(trained, setting)
    reduced = split if setting.trainer in ("zero2", "zero3") else local_numel(trained, setting.trainer, setting.ranks)
    deepspeed = setting.trainer.startswith("zero")
    return TrainerSide(
        actor=actor,
        gradients=reduced * dtype_bytes,
        optimizer=split * (_STATES[setting.optimizer] * setting.state_dtype.itemsize + _FP32 * setting.has_master),
        gathered=_gathered(weights, setting),
        reduce_bucket=setting.reduce_bucket * dtype_bytes if deepspeed else 0,
        gradients_stay=setting.trainer == "zero3",
    )


def local_numel(shapes: Shapes, trainer: Trainer, ranks: int) -> int:
    """Elements of the rank with the most. Each way of sharding rounds up in its own place.

    FSDP2 cuts each tensor along dim 0, ZeRO-3 each tensor where it is flattened, FSDP1 each layer where it is.
    """
    if trainer == "fsdp2":
        return sum(rows_of(shape, ranks) for shape in shapes.values())
    if trainer == "zero3":
        return sum(ceil_div(math.prod(shape), ranks) for shape in shapes.values())
    if trainer == "fsdp1":
        return sum(ceil_div(numel_of(unit), ranks) for unit in units_of(shapes).values())
    return numel_of(shapes)


def _stepped(trained: Shapes, setting: Setting) -> int:
    """Elements that the optimizer of one rank steps."""
    if setting.trainer in ("zero1", "zero2"):
        return ceil_div(numel_of(trained), setting.ranks)
    return local_numel(trained, setting.trainer, setting.ranks)


def _gathered(weights: Shapes, setting: Setting) -> int:
    """Under FSDP what is outside of layers is gathered once and stays until the step is over."""
    if setting.trainer == "zero3":
        return min(numel_of(weights), _ZERO3_LIVE) * setting.actor_dtype.itemsize
    if setting.trainer not in ("fsdp1", "fsdp2"):
        return 0
    outside, *layers = (numel_of(unit) for unit in units_of(weights).values())
    times = 1 if setting.lora_rank else 2
    return (outside + _GATHERED_LAYERS * max(layers)) * setting.compute_dtype.itemsize * times
