"""The cases. Each is called in a fresh process with a GPU, and tells what it measured and what it saw."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import wsync
from wsync.bench.gpu import engines, gathered, loops, lora, memory_case, models, nccl_case, pulls, sharded_pull, steady
from wsync.bench.gpu.checks import check_tokens, free, in_place, load_directly, outcome_of, small_vllm
from wsync.bench.gpu.moonshot import beside_moonshot
from wsync.bench.gpu.outcome import COPY, Limit, Outcome, cast, copies, in_turn
from wsync.bench.samples import Way
from wsync.config import MIB, PathMode

ROUNDS = 12
_BUCKET_BYTES = 256 * MIB
TWO_COPIES, CAST, LOADER = "two device copies", "one cast", "load_weights"
FLATTENED = "flattened_bucket"
EACH, PACKED = "IPC each", "IPC packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    about: str
    run: Callable[[str], Outcome]
    """Gets the name of the case."""

    needs: tuple[str, ...]
    """Packages by the names that they are imported by, the engine's first."""

    separate: bool = False
    """Whether the engine has processes of its own."""

    gpus: int = 1
    """How many it needs."""


def in_process(name: str, shape: str, actor_dtype: torch.dtype, limits: tuple[Limit, ...]) -> Outcome:
    """A module into a vLLM of this process, in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        config = models.config_of(shape, torch.bfloat16)
        engine = engines.start_vllm(models.make_folder(config, Path(folder)), "bfloat16")
        actor = models.make_actor(models.config_of(shape, actor_dtype), actor_dtype, 1)
        [model] = engine.collective_rpc("get_model")
        outcome = outcome_of(name, actor, torch.bfloat16, limits)
        with in_place(outcome, engine), wsync.connect(actor, engine) as session:
            references = {LOADER: lambda: load_directly(engine, model, models.engine_side(actor))}
            numel = outcome.nbytes // 2
            if actor_dtype == torch.bfloat16:
                references[COPY] = copies(outcome.nbytes, 1)
            else:
                references[CAST] = cast(numel, actor_dtype, torch.bfloat16)
            outcome.samples = in_turn(session.sync, references, ROUNDS)
            outcome.facts["stages of the last sync, s"] = dict(session.sync().stages)
            del references
            free()
            check_tokens(outcome, session, actor, engine)
            got = {key: tensor.clone() for key, tensor in model.named_parameters()}
            load_directly(engine, model, models.engine_side(actor))
            outcome.checks["bytes as from load_weights"] = all(
                torch.equal(tensor.view(torch.uint8), got[key].view(torch.uint8))
                for key, tensor in model.named_parameters()
            )
    return outcome


def from_another_process(name: str, start: Callable[[Path, str], Any], path: PathMode) -> Outcome:
    """A module into an engine with processes of its own, over CUDA IPC."""
    with tempfile.TemporaryDirectory() as folder:
        config = models.config_of(models.DENSE, torch.bfloat16)
        engine = start(models.make_folder(config, Path(folder)), "bfloat16")
        actor = models.make_actor(config, torch.bfloat16, 1)
        is_vllm = start is engines.start_vllm
        rivals = (EACH, PACKED) if is_vllm else (FLATTENED,)
        limits = tuple(Limit(reference=rival, factor=1.0) for rival in rivals)
        by_reference = path != "buckets"
        if is_vllm and by_reference:
            limits = (Limit(reference=TWO_COPIES, factor=1.3), *limits)
        outcome = outcome_of(name, actor, torch.bfloat16, limits)
        free()
        free_bytes = torch.cuda.mem_get_info()[0]
        settings = wsync.SyncConfig(transport="cuda_ipc", path=path, bucket_bytes=_BUCKET_BYTES, num_slots=2)
        with in_place(outcome, engine), wsync.connect(actor, engine, config=settings) as session:
            outcome.checks["goes the way of this case"] = (
                "read where the trainer" in session.explain()
            ) is by_reference
            for _ in range(2):
                session.sync()
            taken = free_bytes - torch.cuda.mem_get_info()[0]
            outcome.facts["device bytes taken"] = taken
            outcome.checks["takes at most 2 buckets and 64 MiB"] = taken <= 2 * _BUCKET_BYTES + 64 * MIB
            references: dict[str, Way] = {TWO_COPIES: copies(outcome.nbytes, 2)}
            if is_vllm:
                references[EACH] = lambda: loops.send_each(engine, actor)
                references[PACKED] = lambda: loops.send_packed(engine, actor, _BUCKET_BYTES)
            else:
                references[FLATTENED] = lambda: loops.send_flattened(engine, actor, _BUCKET_BYTES)
            outcome.samples = in_turn(session.sync, references, ROUNDS)
            outcome.facts["stages of the last sync, s"] = dict(session.sync().stages)
            del references
            free()
            check_tokens(outcome, session, actor, engine)
        if not is_vllm:
            engine.shutdown()
    return outcome


def captured(name: str) -> Outcome:
    """CUDA graphs that were captured before the sync answer with the new weights."""
    with (
        small_vllm(name, torch.float32, eager=False) as (engine, actor, outcome),
        wsync.connect(actor, engine) as session,
    ):
        check_tokens(outcome, session, actor, engine)
    return outcome


def asleep(name: str) -> Outcome:
    """Sleep level 2, wake the weights, sync, wake the cache: tokens and buffers are what they should be."""
    with small_vllm(name, torch.float32, sleep=True) as (engine, actor, outcome):
        [model] = engine.collective_rpc("get_model")
        buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
        with wsync.connect(actor, engine) as session:
            [handle] = session.engines
            check_tokens(outcome, session, actor, engine)
            free_bytes = torch.cuda.mem_get_info()[0]
            handle.sleep(level=2)
            outcome.facts["bytes that sleep gave back"] = torch.cuda.mem_get_info()[0] - free_bytes
            models.randomize(actor, 7)
            handle.wake_up(["weights"])
            session.sync()
            handle.wake_up(["kv_cache"])
            expected = models.greedy(actor, engines.prompts(), engines.NEW_TOKENS)
            outcome.checks["tokens after sleep"] = engines.answers_of(engine) == expected
        outcome.checks["buffers after sleep"] = all(
            torch.equal(buffer, buffers[key]) for key, buffer in model.named_buffers()
        )
    return outcome


CASES: Mapping[str, Case] = {
    "vllm-dense": Case(
        about="module to vLLM in one process, dense 7B, bf16",
        run=lambda name: in_process(
            name,
            models.DENSE,
            torch.bfloat16,
            (Limit(reference=COPY, factor=1.3), Limit(reference=LOADER, factor=1 / 3)),
        ),
        needs=("vllm",),
    ),
    "vllm-moe": Case(
        about="module to vLLM in one process, MoE with 4,719 tensors, bf16",
        run=lambda name: in_process(
            name,
            models.MOE,
            torch.bfloat16,
            (Limit(reference=COPY, factor=1.8), Limit(reference=LOADER, factor=1 / 25)),
        ),
        needs=("vllm",),
    ),
    "vllm-cast": Case(
        about="fp32 module to bf16 vLLM in one process, dense 7B",
        run=lambda name: in_process(name, models.DENSE, torch.float32, (Limit(reference=CAST, factor=1.3),)),
        needs=("vllm",),
    ),
    "vllm-ipc": Case(
        about="another process to vLLM over CUDA IPC, dense 7B",
        run=lambda name: from_another_process(name, engines.start_vllm, "auto"),
        needs=("vllm",),
        separate=True,
    ),
    "vllm-ipc-slots": Case(
        about="another process to vLLM over CUDA IPC, dense 7B, 2 slots of 256 MiB",
        run=lambda name: from_another_process(name, engines.start_vllm, "buckets"),
        needs=("vllm",),
        separate=True,
    ),
    "vllm-pull": Case(
        about="another process to vLLM, dense 7B, pulled",
        run=lambda name: pulls.from_another_process(name, models.DENSE, 1.25, ROUNDS),
        needs=("vllm",),
        separate=True,
    ),
    "vllm-pull-moe": Case(
        about="another process to vLLM, MoE with 4,719 tensors, pulled",
        run=lambda name: pulls.from_another_process(name, models.MOE, 1.8, ROUNDS),
        needs=("vllm",),
        separate=True,
    ),
    "vllm-pull-offload": Case(
        about="pulled ten times, the actor offloaded in between",
        run=pulls.with_offloads,
        needs=("vllm",),
        separate=True,
    ),
    "vllm-pull-tp2": Case(
        about="FSDP2 in fp32 on two GPUs to vLLM with two workers on the same, dense 7B, pulled",
        run=lambda name: sharded_pull.measure(name, ROUNDS),
        needs=("vllm",),
        separate=True,
        gpus=2,
    ),
    "vllm-fsdp2": Case(
        about="FSDP2 in fp32 on two GPUs to a vLLM on each, dense 7B, gathered over NCCL",
        run=lambda name: gathered.measure(name, ROUNDS),
        needs=("vllm",),
        separate=True,
        gpus=2,
    ),
    "vllm-nccl": Case(
        about="a trainer on one GPU to vLLM on another over NCCL, dense 7B, beside bare broadcasts",
        run=lambda name: nccl_case.beside_raw(name, ROUNDS),
        needs=("vllm",),
        gpus=2,
    ),
    "vllm-nccl-rivals": Case(
        about="a trainer on one GPU to vLLM on another, dense 7B, beside vLLM's own transfer and pushes of tensors",
        run=lambda name: nccl_case.beside_rivals(name, ROUNDS),
        needs=("vllm",),
        gpus=2,
    ),
    "vllm-moonshot": Case(
        about="another process to vLLM, dense 7B, beside Moonshot's checkpoint-engine",
        run=lambda name: beside_moonshot(name, ROUNDS),
        needs=("vllm", "checkpoint_engine"),
        separate=True,
    ),
    "vllm-graphs": Case(about="CUDA graphs answer with new weights", run=captured, needs=("vllm",)),
    "vllm-sleep": Case(about="sleep level 2, wake, sync", run=asleep, needs=("vllm",)),
    "vllm-memory": Case(
        about="rollout, train, sync in turn on one GPU, dense 7B with AdamW",
        run=memory_case.vllm_memory,
        needs=("vllm",),
    ),
    "vllm-200": Case(
        about="200 syncs hold nothing more",
        run=lambda name: steady.measure(name, steady.IN_PROCESS),
        needs=("vllm",),
    ),
    "vllm-200-ipc": Case(
        about="the same to another process over CUDA IPC",
        run=lambda name: steady.measure(name, steady.REFERENCES),
        needs=("vllm",),
        separate=True,
    ),
    "vllm-200-slots": Case(
        about="the same through slots",
        run=lambda name: steady.measure(name, steady.SLOTS),
        needs=("vllm",),
        separate=True,
    ),
    "vllm-200-pull": Case(
        about="the same, pulled",
        run=lambda name: steady.measure(name, steady.PULLED),
        needs=("vllm",),
        separate=True,
    ),
    "vllm-lora": Case(
        about="LoRA of rank 16 on a dense 7B, merged, to vLLM in one process",
        run=lambda name: lora.merged(name, ROUNDS),
        needs=("vllm", "peft"),
    ),
    "vllm-adapter": Case(about="the adapter alone", run=lora.alone, needs=("vllm", "peft")),
    "vllm-adapter-base": Case(about="merged weights where adapters go, too", run=lora.both, needs=("vllm", "peft")),
    "sglang-ipc": Case(
        about="another process to SGLang over CUDA IPC, dense 7B",
        run=lambda name: from_another_process(name, engines.start_sglang, "auto"),
        needs=("sglang",),
        separate=True,
    ),
    "sglang-memory": Case(
        about="the same phases, SGLang releases its tags",
        run=memory_case.sglang_memory,
        needs=("sglang",),
        separate=True,
    ),
}
