"""What a sync of wsync's takes on one GPU."""

import math
from dataclasses import dataclass

from wsync.bench.cases import numel_of
from wsync.plan import ALIGNMENT_BYTES
from wsync.planner.model import ceil_div
from wsync.planner.setting import Setting

_FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSide:
    """Bytes, at most."""

    slots: int
    """From the first sync until its session is closed."""

    boxes: int
    """Outbox and inbox of a rank that has a part of the actor, for one bucket; as long as the slots."""

    merge: int
    """LoRA only, and only while a sync runs: all factors whole, and the merged weights of a bucket in float32."""


def sync_side(setting: Setting) -> SyncSide:
    """What a sync takes."""
    itemsize = setting.engine_dtype.itemsize
    padded = sum(_align(math.prod(shape) * itemsize) for shape in setting.model.shapes.values())
    bucket = min(setting.bucket_bytes, padded)
    whole = not setting.sharded and not setting.lora_rank
    handed_over = setting.transport == "inproc" and whole
    return SyncSide(
        slots=0 if handed_over else setting.num_slots * bucket,
        boxes=bucket if setting.sharded else 0,
        merge=_merge(setting, bucket // itemsize) if setting.lora_rank else 0,
    )


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
