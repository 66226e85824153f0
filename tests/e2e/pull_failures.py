"""Program: either side of a pull is stopped or killed in the middle. `python -m tests.e2e.pull_failures ENGINE FOLDER`.

This process is rank 0 of an FSDP2 trainer and owns a real engine with two workers; it starts rank 1. One worker walks
into a trap while it reads a rank's shards: see `tests.engines.pull_trap`. Writes FOLDER/facts.json, {part: facts}.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

import wsync
from tests.e2e.bits import Bits, least_bytes
from tests.e2e.engines import KINDS, OpenEngine, SGLang
from tests.e2e.families import build, prompts
from tests.e2e.program import Facts, write
from tests.e2e.trainers import Trainer, fsdp2
from tests.engines.pull_trap import Trap
from tests.engines.vllm_program import caught
from wsync.deadline import Deadline
from wsync.engine import WorkerEngine
from wsync.registry import engine_for
from wsync.testing.ranks import LOOPBACK

FAMILY = "llama"
PATIENT = wsync.SyncConfig(path="pull", timeout_s=60.0)
HASTY = wsync.SyncConfig(path="pull", timeout_s=5.0)

STARTS: Mapping[str, Callable[[Path], Any]] = {
    "vllm": KINDS["vllm-workers-tp2-pull"].start,
    "sglang": lambda folder: SGLang(folder, tp=2, dtype="bfloat16"),
}
"""vLLM reads straight into its parameters; SGLang's have another dtype, so that all of them are cast on the way."""


class Scene:
    """The trainer on this rank, and the engine on rank 0."""

    def __init__(self, folder: Path, engine: OpenEngine | None) -> None:
        self.folder, self.engine, self.note = folder, engine, folder / "note.json"
        self.trainer: Trainer = fsdp2(FAMILY, 1, folder)
        self.bits = Bits(engine, FAMILY, folder / "launch")
        self.pids: list[int] = told(os.getpid())

    @property
    def handle(self) -> Any:
        """What is synced."""
        return None if self.engine is None else self.engine.handle

    @property
    def control(self) -> WorkerEngine:
        """wsync's side of it."""
        return cast("WorkerEngine", engine_for(self.handle))

    def trap(self, **what: Any) -> None:
        """*Collective.* In the worker of rank 1, which has half of all weights."""
        self.note.unlink(missing_ok=True)
        if self.engine is not None:
            self.engine.set_trap(Trap(worker=1, note=str(self.note), **what))
        dist.barrier()

    def sync(self, config: wsync.SyncConfig) -> list[object]:
        """*Collective.* Connect and sync: [error, message, seconds]."""

        def run() -> None:
            with wsync.connect(self.trainer.actor, self.handle, config=config) as session:
                session.sync()

        began = time.monotonic()
        return [*caught(run), time.monotonic() - began]

    def refusals(self) -> Facts:
        """What the engine says that is asked for its version, or for tokens; nothing where there is none."""
        engine = self.engine
        if engine is None:
            return {}
        return {"version": caught(self.control.version), "generate": caught(lambda: engine.generate(prompts()))}

    def told_of(self) -> Facts:
        """What the worker wrote down in the trap."""
        facts: Facts = json.loads(self.note.read_text())
        return facts

    def healed(self) -> Facts:
        """*Collective.* A sync that nobody disturbs, bit by bit."""
        with wsync.connect(self.trainer.actor, self.handle, config=PATIENT) as session:
            report = session.sync()
        bits = self.bits.compare(self.trainer.full(), self.folder / "now")
        least = least_bytes(self.folder / "launch", 2)
        return {**bits, "pulled": report.pulled_nbytes, "least": least, "refused": self.refusals()}


def undisturbed(scene: Scene) -> Facts:
    """Nothing happens."""
    scene.trainer.step(1)
    return scene.healed()


def trainer_goes_on(scene: Scene) -> Facts:
    """Rank 1 stands still while half of its shards are read, and goes on in time."""
    scene.trainer.step(2)
    scene.trap(source=scene.pids[1], victim=scene.pids[1], number=int(signal.SIGSTOP), goes_on=True)
    error = scene.sync(PATIENT)
    bits = scene.bits.compare(scene.trainer.full(), scene.folder / "now")
    return {"error": error, "note": scene.told_of(), "refused": scene.refusals(), **bits}


def trainer_stopped(scene: Scene, who: int) -> Facts:
    """Rank `who` stands still in the middle, and goes on when the other one has given up."""
    scene.trainer.step(3 + who)
    scene.trap(source=scene.pids[who], victim=scene.pids[who], number=int(signal.SIGSTOP))
    error = scene.sync(HASTY)
    if dist.get_rank() != who:
        os.kill(scene.pids[who], signal.SIGCONT)
    errors = told(error)
    return {"errors": errors, "note": scene.told_of(), "refused": scene.refusals(), "healed": scene.healed()}


def owner_stopped(scene: Scene) -> Facts:
    """`trainer_stopped` of the rank that has the engine."""
    return trainer_stopped(scene, 0)


def other_stopped(scene: Scene) -> Facts:
    """`trainer_stopped` of the rank that has no engine."""
    return trainer_stopped(scene, 1)


def worker_stopped(scene: Scene) -> Facts:
    """A worker stands still in the middle, and then reads the rest: of other weights, as the trainer has gone on."""
    scene.trainer.step(5)
    scene.trap(source=scene.pids[1], number=int(signal.SIGSTOP))
    errors = told(scene.sync(HASTY))
    facts: Facts = {"errors": errors, "note": scene.told_of(), "refused": scene.refusals()}
    facts["too early"] = told(scene.sync(HASTY))
    scene.trainer.step(6)
    dist.barrier()
    if scene.engine is not None:
        os.kill(facts["note"]["worker"], signal.SIGCONT)
        facts["its late answer"] = caught(lambda: scene.control.join(Deadline.after(60.0)))
    return {**facts, "refused then": scene.refusals(), "healed": scene.healed()}


def trainer_killed(scene: Scene) -> Facts:
    """Rank 1 is killed in the middle. A new trainer, of one rank, takes the engine over. Rank 1 never returns."""
    scene.trainer.step(7)
    scene.trap(source=scene.pids[1], victim=scene.pids[1], number=int(signal.SIGKILL))
    facts: Facts = {"error": scene.sync(PATIENT), "note": scene.told_of(), "refused": scene.refusals()}
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = build(FAMILY, 8)
    scene.trainer = Trainer(model, model)
    return {**facts, "healed": scene.healed()}


def worker_killed(scene: Scene) -> Facts:
    """A worker is killed in the middle. SGLang's watchdog would then end this process too."""
    scene.trap(source=os.getpid(), number=int(signal.SIGKILL))
    if isinstance(scene.engine, SGLang):
        scene.engine.handle.tokenizer_manager._subprocess_watchdog.stop()
    facts: Facts = {"error": scene.sync(PATIENT), "note": scene.told_of(), "refused": scene.refusals()}
    return {**facts, "next sync": scene.sync(PATIENT)}


PARTS = (undisturbed, trainer_goes_on, other_stopped, owner_stopped, worker_stopped, trainer_killed, worker_killed)


def told(mine: Any) -> list[Any]:
    """*Collective.* What every rank says."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def act(folder: Path, engine: OpenEngine | None) -> None:
    """Every part in turn. Rank 1 ends in one of them."""
    scene, facts = Scene(folder, engine), Facts()
    for part in PARTS:
        facts[part.__name__] = part(scene)
        if engine is not None:
            write(folder / "facts.json", facts)
            print(f"done: {part.__name__}", flush=True)


def main(name: str, folder: Path, port: int = 0) -> None:
    """Rank 1 if there is a port: that of rank 0's store."""
    torch.set_num_threads(1)
    rank, patience = int(port > 0), timedelta(seconds=300)
    store = TCPStore(LOOPBACK, port, None, not rank, patience, False)
    if rank == 0:
        build(FAMILY, 1000).save_pretrained(folder / "launch")
        subprocess.Popen([sys.executable, "-m", "tests.e2e.pull_failures", name, str(folder), str(store.port)])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
    act(folder, STARTS[name](folder / "launch") if rank == 0 else None)
    sys.stdout.flush()
    os._exit(0)  # of the engine and of rank 1 nothing whole is left that could be closed


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
