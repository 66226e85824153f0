"""Program: an engine core and workers in other processes. `python -m tests.engines.vllm_workers MODELS OUT`."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import wsync
from tests.engines.vllm_models import prompts
from tests.engines.vllm_program import (
    SETTINGS,
    Facts,
    Tripwire,
    caught,
    kit,
    live_tensors,
    sampling,
    start,
    tokens,
    trainer,
    update,
    write,
)
from wsync.adapters.engines.vllm import VLLMEngine
from wsync.deadline import Deadline

EXTENSION = "tests.engines.vllm_plain.PlainExtension"


def without_extension(llm: Any) -> Facts:
    """What is said of an LLM that was made without the worker extension, or with one of somebody else's."""
    config = llm.llm_engine.vllm_config.parallel_config
    config.worker_extension_cls = ""
    facts: Facts = {"none": caught(lambda: VLLMEngine(llm))}
    config.worker_extension_cls = "collections.OrderedDict"
    facts["other"] = caught(lambda: VLLMEngine(llm))
    config.worker_extension_cls = EXTENSION
    return facts


def in_flight(llm: Any, folder: Path) -> Facts:
    """Requests that are aborted, and kept: the engine core would otherwise go on with them by itself."""
    facts: Facts = {}
    for mode in ("abort", "keep"):
        llm.enqueue([{"prompt_token_ids": prompts()[3]}], sampling(), use_tqdm=False)
        wsync.sync(trainer(folder), llm, config=replace(SETTINGS, pause=mode))
        facts[mode] = [len(done.outputs[0].token_ids) for done in llm.wait_for_completion(use_tqdm=False)]
    return {**facts, "tokens": tokens(llm)}


def stalled(llm: Any, folder: Path, victim: int) -> Facts:
    """`victim` stops in the middle of an update, and goes on when the sync has been given up."""
    hasty = replace(SETTINGS, timeout_s=3.0)
    actor = Tripwire(trainer(folder), 2, lambda: os.kill(victim, signal.SIGSTOP))
    facts: Facts = {"error": caught(lambda: wsync.sync(actor, llm, config=hasty))}
    facts["generate"] = caught(lambda: tokens(llm))
    facts["next sync"] = caught(lambda: wsync.sync(trainer(folder), llm, config=hasty))
    os.kill(victim, signal.SIGCONT)
    facts["its late answer"] = caught(lambda: VLLMEngine(llm).join(Deadline.after(60.0)))
    wsync.sync(trainer(folder), llm, config=SETTINGS)
    return {**facts, "tokens healed": tokens(llm)}


def killed(llm: Any, folder: Path, victim: int) -> Facts:
    """`victim` dies in the middle of an update."""
    moments: list[float] = []

    def kill() -> None:
        os.kill(victim, signal.SIGKILL)
        moments.append(time.monotonic())

    actor = Tripwire(trainer(folder), 2, kill)
    facts: Facts = {"error": caught(lambda: wsync.sync(actor, llm, config=SETTINGS))}
    facts["seconds"] = time.monotonic() - moments[0]
    facts["generate"] = caught(lambda: tokens(llm))
    facts["next sync"] = caught(lambda: wsync.sync(trainer(folder), llm, config=SETTINGS))
    return facts


def processes(llm: Any) -> list[int]:
    """The engine core, then the workers that it started."""
    core = llm.llm_engine.engine_core.resources.engine_manager.processes[0].pid
    children = Path(f"/proc/{core}/task/{core}/children").read_text().split()
    workers = [pid for pid in children if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return [core, *map(int, workers)]


def run(models: Path, tp: int) -> Facts:
    """Everything on one engine; it is dead at the end."""
    a, b = models / "llama_a", models / "llama_b"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
    llm = start(a, tensor_parallel_size=tp, worker_extension_cls=EXTENSION)
    core, *workers = processes(llm)
    facts: Facts = {"extension": without_extension(llm), "update": update(llm, b), "in flight": in_flight(llm, a)}
    if tp == 2:
        facts["kit"] = kit(llm, "llama", "shm", live_tensors)
    facts["stalled"] = stalled(llm, b, workers[-1])
    facts["killed"] = killed(llm, a, core if tp == 1 else workers[-1])
    return facts


def main(models: Path, out: Path) -> None:
    """Run everything with one worker, and with two."""
    facts: Facts = {}
    for tp in (1, 2):
        facts[f"tp {tp}"] = run(models, tp)
        write(out, facts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
