"""Whether a phase fits on its GPU, and if it does not, which single change would make it fit."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from wsync.config import MIB
from wsync.errors import ConfigError
from wsync.memory.sizes import GIB, gib
from wsync.planner.engine_side import engine_side
from wsync.planner.phases import ACTOR, GENERATING, KV_CACHE, PhasePlan, predict, predict_moves
from wsync.planner.setting import OFFLOADS, Setting, Trainer

_MOST_RANKS = 1024
_MOST_TP = 64
_SMALL_BUCKET = 64 * MIB
_SHORTEST = 512
"""Tokens of the shortest sequences that are worth proposing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """On one phase."""

    plan: PhasePlan
    left: int
    """Bytes that the GPU has more than the phase takes; negative: how many are missing."""

    changes: Sequence[str]
    """What would make the phase fit, each by itself. Empty if it does fit, or no single change is enough."""

    beside_cache: bool
    """Whether trainer weights are beside the KV cache, which costs what they take."""

    @property
    def fits(self) -> bool:
        """Whether the GPU has enough."""
        return self.left >= 0


def judge(setting: Setting) -> Sequence[Verdict]:
    """A verdict on each of the phases that `predict` gives."""
    return [_judge(setting, plan) for plan in predict(setting)]


def judge_moves(setting: Setting) -> Sequence[tuple[PhasePlan, int]]:
    """The steps that `predict_moves` gives, each with the bytes that are left; negative: missing."""
    return [(plan, setting.gpu_bytes - plan.peak) for plan in predict_moves(setting)]


def _judge(setting: Setting, plan: PhasePlan) -> Verdict:
    left = _left(setting, plan)
    return Verdict(
        plan=plan,
        left=left,
        changes=[] if left >= 0 else list(_changes(setting, plan, -left)),
        beside_cache=ACTOR in plan.residents and KV_CACHE in plan.residents,
    )


def _left(setting: Setting, plan: PhasePlan) -> int:
    """An engine that may not have any KV cache lacks what that would take."""
    left = setting.gpu_bytes - plan.peak
    lacks = engine_side(setting).kv_lacks if plan.name in GENERATING else 0
    return min(left, -lacks) if lacks else left


def _changes(setting: Setting, plan: PhasePlan, missing: int) -> Iterator[str]:
    """One text for each change that is enough."""
    tenths = math.ceil(10 * missing / GIB)
    if 10 * plan.residents.get(KV_CACHE, 0) > tenths * GIB:
        yield f"a KV cache smaller by {tenths / 10:.1f} GiB"
    for kind in _candidates(setting):
        found = next((text for text, changed in kind if _fits(changed, plan.name)), None)
        if found is not None:
            yield found


def _fits(setting: Setting, phase: str) -> bool:
    return any(plan.name == phase and _left(setting, plan) >= 0 for plan in predict(setting))


def _candidates(setting: Setting) -> Iterator[Iterable[tuple[str, Setting]]]:
    """For each kind of change: what it is, and the setting with it, the smallest change first."""
    for part in OFFLOADS:
        if part not in setting.offload:
            yield [(f"offload of the {part}", replace(setting, offload={*setting.offload, part}))]
    lacks = engine_side(setting).kv_lacks
    if setting.kv_fraction is not None and lacks:
        fraction = math.ceil(100 * (setting.kv_fraction + lacks / setting.gpu_bytes)) / 100
        if fraction <= 1:
            yield [(f"a KV fraction of {fraction:g}", replace(setting, kv_fraction=fraction))]
    if setting.trainer in ("plain", "zero1", "zero2") and setting.ranks > 1:
        shards: tuple[Trainer, ...] = ("fsdp2", "zero3")
        yield [(f"{one} in place of {setting.trainer}", replace(setting, trainer=one)) for one in shards]
    if setting.trainer != "plain":
        yield _more_ranks(setting)
    yield _more_workers(setting)
    if setting.bucket_bytes > _SMALL_BUCKET:
        yield [(f"buckets of {gib(_SMALL_BUCKET)}", replace(setting, bucket_bytes=_SMALL_BUCKET))]
    if setting.staging_bytes:
        yield [("no staging", replace(setting, staging_bytes=0))]
    if setting.activations is None and not setting.checkpointing:
        yield [("activation checkpointing", replace(setting, checkpointing=True))]
    if setting.activations is None and setting.micro_batch > 1:
        yield [("micro-batches of 1 sequence", replace(setting, micro_batch=1))]
    if setting.activations is None:
        times = range(1, (setting.sequence // _SHORTEST).bit_length())
        halves = (setting.sequence >> number for number in times)
        yield ((f"sequences of {tokens} tokens", replace(setting, sequence=tokens)) for tokens in halves)


def _more_ranks(setting: Setting) -> Iterator[tuple[str, Setting]]:
    for ranks in _doubled(setting.ranks, _MOST_RANKS):
        with suppress(ConfigError):  # not on one node any more
            gpus = math.lcm(setting.gpus, ranks)
            yield f"{ranks} ranks that share the actor", replace(setting, ranks=ranks, gpus=gpus)


def _more_workers(setting: Setting) -> Iterator[tuple[str, Setting]]:
    for tp in _doubled(setting.tp, _MOST_TP):
        with suppress(ConfigError):  # the model cannot be split that far
            gpus = math.lcm(setting.gpus, tp)
            yield f"an engine over {tp} workers", replace(setting, tp=tp, gpus=gpus)


def _doubled(count: int, most: int) -> Iterator[int]:
    while (count := 2 * count) <= most:
        yield count
