"""The command line: what to predict, and where the results go."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import get_args

from wsync.bench.plot import check_plot
from wsync.config import MIB, PathMode, SyncConfig
from wsync.errors import ConfigError, WsyncError
from wsync.memory.sizes import GIB
from wsync.planner.hf_config import read_config
from wsync.planner.models import NAMES, named
from wsync.planner.plot import plot
from wsync.planner.setting import CONTEXT_BYTES, DTYPES, OFFLOADS, Optimizer, Setting, Trainer, Transport
from wsync.planner.show import as_json, fits, table
from wsync.planner.verdict import judge

TOO_LARGE, MISUSED = 1, 2
"""Exit codes: a phase does not fit; the arguments make no sense."""

_LORA_RANK = 16
_KV_FRACTION = 0.5
_UNITS = {"": GIB, "GiB": GIB, "GB": 10**9}


def main(argv: Sequence[str] | None = None) -> int:
    """Predict, show, write down.

    Args:
        argv: arguments; None: those of this process.

    Returns:
        0 if every phase fits, else `TOO_LARGE`; `MISUSED`, with a message, for bad arguments.
    """
    options = _parser().parse_args(argv)
    try:
        setting = _setting(options)
        if options.json not in (None, "-") and not Path(options.json).parent.is_dir():
            raise ConfigError(f"--json {options.json}: there is no folder {Path(options.json).parent}")
        if options.plot:
            check_plot(options.plot)
    except WsyncError as error:
        print(f"python -m wsync.planner: {error}", file=sys.stderr)
        return MISUSED
    verdicts = judge(setting)
    table(setting, verdicts, sys.stderr if options.json == "-" else sys.stdout)
    if options.json:
        _write(json.dumps(as_json(setting, verdicts), indent=1) + "\n", options.json)
    if options.plot:
        plot([verdict.plan for verdict in verdicts], setting.gpu_bytes, options.plot)
    return 0 if fits(setting, verdicts) else TOO_LARGE


def _setting(options: argparse.Namespace) -> Setting:
    """Raises `ConfigError`."""
    fraction = _KV_FRACTION if options.kv_gib is None and options.kv_fraction is None else options.kv_fraction
    lora_rank = _LORA_RANK if options.trainer == "lora" and not options.lora_rank else options.lora_rank
    return Setting(
        model=read_config(options.config) if options.config else named(options.model),
        gpus=options.gpus,
        gpu_bytes=options.gpu_mem,
        gpus_per_node=options.gpus_per_node,
        trainer="plain" if options.trainer == "lora" else options.trainer,
        ranks=options.ranks or options.gpus,
        lora_rank=lora_rank,
        actor_dtype=DTYPES[options.actor_dtype],
        compute_dtype=DTYPES[options.compute_dtype],
        optimizer=options.optimizer,
        state_dtype=DTYPES[options.state_dtype],
        master=options.master,
        reduce_bucket=options.reduce_bucket,
        engine_dtype=DTYPES[options.engine_dtype],
        tp=options.tp,
        kv_bytes=options.kv_gib,
        kv_fraction=fraction,
        engine_activations=options.engine_activations_gib,
        cuda_graph_bytes=options.cuda_graph_gib,
        sleep_level=options.sleep_level,
        transport=options.transport,
        bucket_bytes=round(options.bucket_mib * MIB),
        num_slots=options.num_slots,
        path=options.path,
        staging_bytes=round(options.staging_mib * MIB),
        offload=frozenset(options.offload),
        activations=options.activations_gib,
        micro_batch=options.micro_batch,
        sequence=options.sequence,
        checkpointing=options.checkpointing,
        context_bytes=options.cuda_context_gib,
    )


def _write(text: str, where: str) -> None:
    if where == "-":
        with suppress(BrokenPipeError):
            sys.stdout.write(text)
    else:
        Path(where).write_text(text, encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wsync.planner", description="Predict what co-located training takes, from shapes alone."
    )
    memory = parser.add_subparsers(required=True, metavar="WHAT").add_parser(
        "memory",
        help="bytes on each GPU in each phase, and whether they fit",
        description="Bytes on each GPU in each phase, and whether they fit. Sizes are GiB (2**30 bytes).",
    )
    _add_model(memory.add_mutually_exclusive_group(required=True).add_argument)
    _add_job(memory.add_argument)
    _add_trainer(memory.add_argument)
    _add_cache(memory.add_mutually_exclusive_group().add_argument)
    _add_engine(memory.add_argument)
    _add_sync(memory.add_argument)
    return parser


def _add_model(add: Callable[..., object]) -> None:
    add("--model", metavar="NAME", help=f"by name: {', '.join(NAMES)}")
    add("--config", type=Path, metavar="PATH", help="or by its config.json of Hugging Face, or the folder of that")


def _add_job(add: Callable[..., object]) -> None:
    add("--gpus", type=_count, default=1, metavar="N", help="of the whole job (default 1)")
    add("--gpus-per-node", type=_count, default=8, metavar="N", help="at most, for host memory (default 8)")
    add("--gpu-mem", type=_memory, required=True, metavar="SIZE", help="of one GPU: 140 or 140GiB, or 150GB (10**9)")
    add("--cuda-context-gib", type=_gib, default=CONTEXT_BYTES, metavar="GIB", help="of each process (default 0.6)")
    add("--json", metavar="FILE", help="write the prediction; - for stdout")
    add("--plot", type=Path, metavar="FILE", help="draw the phases; .png, .svg or .pdf")


def _add_trainer(add: Callable[..., object]) -> None:
    kinds = (*get_args(Trainer), "lora")
    add("--trainer", choices=kinds, default="fsdp2", help="default fsdp2; lora is plain with --lora-rank 16")
    add("--ranks", type=_count, metavar="N", help="that share one copy of the actor (default: all GPUs)")
    add(
        "--lora-rank",
        type=partial(_count, least=0),
        default=0,
        metavar="R",
        help="of LoRA on any trainer (default: none)",
    )
    add("--actor-dtype", choices=DTYPES, default="fp32", help="default fp32")
    add("--compute-dtype", choices=DTYPES, default="bf16", help="of activations and gathered layers (default bf16)")
    add("--optimizer", choices=get_args(Optimizer), default="adamw", help="default adamw")
    add("--state-dtype", choices=DTYPES, default="fp32", help="of its states (default fp32)")
    add("--master", action=argparse.BooleanOptionalAction, help="fp32 copy in the optimizer (default: zero1 to zero3)")
    add(
        "--reduce-bucket",
        type=_count,
        default=500_000_000,
        metavar="N",
        help="DeepSpeed's reduce_bucket_size (default 5e8)",
    )
    add("--offload", type=_names, default=OFFLOADS, metavar="LIST", help="default actor,optimizer; or none")
    add(
        "--activations-gib",
        type=_gib,
        metavar="GIB",
        help="of a training step (default: estimated from the next three)",
    )
    add("--micro-batch", type=_count, default=1, metavar="N", help="sequences at once (default 1)")
    add("--sequence", type=_count, default=4096, metavar="N", help="tokens of each (default 4096)")
    add("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="of activations (default on)")


def _add_cache(add: Callable[..., object]) -> None:
    add("--kv-gib", type=partial(_gib, least=1), metavar="GIB", help="KV cache of one worker")
    add(
        "--kv-fraction",
        type=_number,
        metavar="F",
        help="weights + activations + KV cache, as vLLM's gpu_memory_utilization (default 0.5)",
    )


def _add_engine(add: Callable[..., object]) -> None:
    add("--engine-dtype", choices=DTYPES, default="bf16", help="of weights and KV cache (default bf16)")
    add("--tp", type=_count, default=1, metavar="N", help="workers of a replica (default 1)")
    add("--engine-activations-gib", type=_gib, metavar="GIB", help="of the largest step (default: estimated)")
    add("--cuda-graph-gib", type=_gib, default=0, metavar="GIB", help="of one worker's CUDA graphs (default 0)")
    add("--sleep-level", type=int, choices=(1, 2), default=2, help="1 keeps the weights in host memory (default 2)")


def _add_sync(add: Callable[..., object]) -> None:
    default = SyncConfig()
    add("--transport", choices=get_args(Transport), default="cuda_ipc", help="default cuda_ipc")
    add(
        "--bucket-mib",
        type=_number,
        default=default.bucket_bytes / MIB,
        metavar="MIB",
        help="of a slot, in MiB (default 256)",
    )
    add("--num-slots", type=_count, default=default.num_slots, metavar="N", help="default 2")
    add("--path", choices=get_args(PathMode), default=default.path, help="how weights move (default auto)")
    add(
        "--staging-mib",
        type=_number,
        default=default.staging_bytes / MIB,
        metavar="MIB",
        help="of what is cast for other GPUs that pull (default 2048)",
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text != "none" else ()
    if unknown := [name for name in names if name not in OFFLOADS]:
        raise argparse.ArgumentTypeError(f"{unknown} cannot be offloaded; choose from {', '.join(OFFLOADS)}, or none")
    return names


def _memory(text: str) -> int:
    unit = next((unit for unit in ("GiB", "GB") if text.endswith(unit)), "")
    return round(_positive(text.removesuffix(unit)) * _UNITS[unit])


def _gib(text: str, least: int = 0) -> int:
    nbytes = round(_number(text) * GIB)
    if nbytes < least:
        raise argparse.ArgumentTypeError(f"{text} is too small a size")
    return nbytes


def _count(text: str, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a number") from None
    if not abs(value) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value
