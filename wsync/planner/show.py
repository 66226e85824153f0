"""A prediction as a table, and as JSON."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from wsync.memory.sizes import GIB, gib
from wsync.planner.engine_side import engine_side, kv_bytes_per_token
from wsync.planner.phases import GENERATING, PhasePlan, predict_host
from wsync.planner.setting import Setting
from wsync.planner.verdict import Verdict, judge_moves


def table(setting: Setting, verdicts: Sequence[Verdict], out: TextIO) -> None:
    """Residents by phase, what is left of a GPU, and below that what to change, the steps between, and the host."""
    print(_about(setting), file=out)
    print(file=out)
    names = list(dict.fromkeys(name for verdict in verdicts for name in verdict.plan.residents))
    lines = [["GiB on each GPU", *(verdict.plan.name for verdict in verdicts)]]
    for name in names:
        lines.append([name, *(_cell(verdict.plan.residents.get(name)) for verdict in verdicts)])
    lines.append(["peak", *(_cell(verdict.plan.peak) for verdict in verdicts)])
    lines.append(["left", *(_cell(verdict.left) for verdict in verdicts)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for head, *cells in lines:
        shown = [head.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))]
        print("  ".join(shown).rstrip(), file=out)
    print(file=out)
    for line in [*(_words(setting, verdict) for verdict in verdicts), *_notes(setting, verdicts)]:
        print(line, file=out)


def as_json(setting: Setting, verdicts: Sequence[Verdict]) -> Mapping[str, Any]:
    """The same; everything is in bytes."""
    return {
        "model": setting.model.name,
        "parameters": setting.model.numel,
        "gpu_bytes": setting.gpu_bytes,
        "fits": fits(setting, verdicts),
        "phases": [
            {
                **_plan(verdict.plan, verdict.left),
                "largest": verdict.plan.largest,
                "changes": list(verdict.changes),
                "actor_beside_cache": verdict.beside_cache,
            }
            for verdict in verdicts
        ],
        "moves": [_plan(plan, left) for plan, left in judge_moves(setting)],
        "host_bytes_per_node": dict(predict_host(setting)),
        "kv_cache_tokens": _tokens(setting),
    }


def fits(setting: Setting, verdicts: Sequence[Verdict]) -> bool:
    """Whether every phase does, and every step between them."""
    return all(verdict.fits for verdict in verdicts) and all(left >= 0 for _, left in judge_moves(setting))


def _plan(plan: PhasePlan, left: int) -> dict[str, Any]:
    return {"name": plan.name, "fits": left >= 0, "peak": plan.peak, "left": left, "residents": dict(plan.residents)}


def _about(setting: Setting) -> str:
    lora = f" with LoRA of rank {setting.lora_rank}" if setting.lora_rank else ""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in (setting.actor_dtype, setting.engine_dtype)]
    master = ", float32 master copy" if setting.has_master else ""
    return (
        f"{setting.model.name}: {setting.model.numel / 1e9:.2f}e9 parameters, {setting.gpus} GPU(s) of "
        f"{gib(setting.gpu_bytes)}\n"
        f"trainer: {setting.trainer}{lora} over {setting.ranks} rank(s), {dtypes[0]}, {setting.optimizer}{master}; "
        f"offloaded: {', '.join(sorted(setting.offload)) or 'nothing'}\n"
        f"engine: {dtypes[1]}, {setting.tp} worker(s) a replica, over {setting.transport}, sleep level "
        f"{setting.sleep_level}"
    )


def _words(setting: Setting, verdict: Verdict) -> str:
    plan = verdict.plan
    largest = f"{plan.largest} is the largest with {gib(plan.residents.get(plan.largest, 0))}"
    if verdict.fits:
        return f"{plan.name} fits: {gib(verdict.left)} are left; {largest}"
    whole = f"{plan.name} does not fit: {gib(-verdict.left)} are missing; {largest}"
    if plan.name in GENERATING and engine_side(setting).kv_lacks:
        whole += ", and there is no room for a KV cache"
    if verdict.changes:
        return f"{whole}. Enough by itself: {'; or '.join(verdict.changes)}"
    return f"{whole}. No single change that is known here is enough"


def _notes(setting: Setting, verdicts: Sequence[Verdict]) -> list[str]:
    lines = []
    if any(verdict.beside_cache for verdict in verdicts):
        lines.append(
            "the actor's weights are beside the KV cache: offload the actor, and the cache can be larger by them"
        )
    steps = [
        f"{plan.name} {plan.peak / GIB:.1f}{' (does not fit)' if left < 0 else ''}"
        for plan, left in judge_moves(setting)
    ]
    lines.append(textwrap.fill(f"steps from train to train, peak of each in GiB: {', '.join(steps)}", width=120))
    host = predict_host(setting)
    parts = ", ".join(f"{name} {gib(nbytes)}" for name, nbytes in host.items()) or "nothing"
    lines.append(f"host memory of a node of {setting.node_gpus} GPU(s): {gib(sum(host.values()))} ({parts})")
    lines.append(f"the KV cache of a replica has room for {_tokens(setting):,} tokens")
    return lines


def _tokens(setting: Setting) -> int:
    return engine_side(setting).kv_cache // kv_bytes_per_token(setting)


def _cell(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / GIB:.1f}"
