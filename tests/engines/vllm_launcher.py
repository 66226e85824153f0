"""Program for torchrun: every rank owns an LLM, or a part of one. `-m tests.engines.vllm_launcher MODELS OUT`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous

import tests.engines.vllm_plain  # noqa: F401 - before the first engine
import wsync
from tests.engines.vllm_program import (
    SETTINGS,
    Facts,
    Tripwire,
    caught,
    dropped,
    fail,
    start,
    tokens,
    trainer,
    update,
    write,
)
from wsync.adapters.engines.vllm import VLLMEngine


def sharded(folder: Path) -> Any:
    """The trainer's model under FSDP2 over both ranks."""
    model = trainer(folder)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def torn_on_one(llm: Any, folder: Path, healed_with: Path, rank: int) -> Facts:
    """Rank 1 fails at its third bucket: both ranks hold half of the news, say so, and are healed by the next sync."""
    actor = Tripwire(trainer(folder), 2, fail) if rank == 1 else trainer(folder)
    facts: Facts = {"error": caught(lambda: wsync.sync(actor, llm, config=SETTINGS))}
    facts["generate"] = caught(lambda: tokens(llm))
    wsync.sync(sharded(healed_with), llm, config=SETTINGS)
    return {**facts, "tokens healed": tokens(llm)}


def run(models: Path, tp: int) -> Facts:
    """Everything, with one engine on both ranks (`tp` 2) or one on each (`tp` 1)."""
    store, rank, size = next(iter(rendezvous("env://")))
    dist.init_process_group("gloo", store=PrefixStore(f"tp{tp}", store), rank=rank, world_size=size)
    a, b = models / "llama_a", models / "llama_b"
    engines = [start(a, tensor_parallel_size=tp, distributed_executor_backend="external_launcher")]
    facts = update(engines[0], b, sharded)
    facts["replica"] = VLLMEngine(engines[0]).replica
    facts["torn"] = torn_on_one(engines[0], a, b, rank)
    dist.barrier()
    facts["collected"] = dropped(engines)
    return facts  # and with its engine vLLM has ended the process group


def main(models: Path, out: Path) -> None:
    """Run everything; each rank writes its own facts."""
    facts: Facts = {}
    for tp in (2, 1):
        facts[f"tp {tp}"] = run(models, tp)
        write(out.with_name(f"{out.name}.{os.environ['RANK']}"), facts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
