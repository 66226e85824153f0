"""What a sync of wsync's takes on one GPU."""

import math
from dataclasses import dataclass

from wsync.bench.cases import Shapes, numel_of
from wsync.plan import ALIGNMENT_BYTES
from wsync.planner.model import ceil_div
from wsync.planner.setting import Setting
from wsync.planner.trainer_side import local_numel

_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSide:
    """Bytes, at most."""

    slots: int
    """From the first sync until its session is closed."""

    boxes: int
    """Outbox and inbox of a rank that has a part of the actor, for one bucket; from the first sync on."""

    staging: int
    """What a rank casts before workers on other GPUs read it, at most; as long as the slots."""

    peer_contexts: int
    """CUDA contexts of workers on other GPUs that read this one; from the first sync on."""

    merge: int
    """LoRA only, and only while a sync runs: all factors whole, and the merged weights of a bucket in float32."""


def sync_side(setting: Setting) -> SyncSide:
    """What a sync takes."""
    itemsize, shapes = setting.engine_dtype.itemsize, setting.model.shapes
    merged = setting.model.lora_targets() if setting.lora_rank else {}
    travelling = merged if setting.reads_in_place else shapes
    padded = sum(_align(math.prod(shape) * itemsize) for shape in travelling.values())
    bucket = min(setting.bucket_bytes, padded)
    return SyncSide(
        slots=setting.num_slots * bucket,
        boxes=bucket if setting.sharded else 0,
        staging=_staging(setting, {name: shape for name, shape in shapes.items() if name not in travelling}),
        peer_contexts=setting.context_bytes * (_peers(setting) if setting.reads_in_place else 0),
        merge=_merge(setting, bucket // itemsize) if setting.lora_rank else 0,
    )


def _staging(setting: Setting, pulled: Shapes) -> int:
    """As if all that a rank has were read by some other GPU."""
    narrower = setting.engine_dtype.itemsize < setting.actor_dtype.itemsize
    if not setting.pulls or setting.gpus == 1 or not narrower:
        return 0
    numel = local_numel(pulled, setting.trainer, setting.ranks)
    return min(setting.staging_bytes, numel * setting.engine_dtype.itemsize)


def _peers(setting: Setting) -> int:
    """Workers on other GPUs that read the GPU with the most of them."""
    return (setting.gpus if setting.pulls else setting.tp) - 1


def _merge(setting: Setting, bucket: int) -> int:
    """`bucket` is in elements. A tensor of two buckets is merged whole, and what the next bucket needs too is kept."""
    targets = setting.model.lora_targets()
    largest = max(math.prod(shape) for shape in targets.values())
    merged = min(numel_of(targets), 2 * (bucket + 2 * largest)) + largest
    parts = setting.ranks if setting.sharded else 1
    factors = numel_of(setting.model.lora_shapes(setting.lora_rank)) if setting.sharded else 0
    return _FP32 * (ceil_div(merged, parts) + factors)


def _align(nbytes: int) -> int:
    return ALIGNMENT_BYTES * ceil_div(nbytes, ALIGNMENT_BYTES)
