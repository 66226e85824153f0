"""One rank of `benchmarks.scaling`: `python -m benchmarks.scaling_rank LAYOUT GPUS RANK PORT OUT ROUNDS SMALL`."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

import wsync
from benchmarks import scaling_floors
from benchmarks.scaling_layouts import Layout, layouts
from benchmarks.scaling_trainer import ShardedActor
from wsync.bench.gpu import engines, models
from wsync.bench.gpu.checks import Answers, free, says
from wsync.bench.gpu.gather_loops import packed_gather
from wsync.bench.gpu.links import bring, received_bytes
from wsync.bench.gpu.outcome import Outcome, cast, in_turn, seconds_on_device
from wsync.bench.samples import Way, seconds_of
from wsync.config import MIB
from wsync.report import SyncReport

LOCAL, LINK, PACKED, EACH = "local floor", "link floor", "packed all-gather", "gather of each tensor"

_LOOPBACK = "127.0.0.1"
_TIMEOUT_S = 420.0
_SEEDS = (2, 3, 4)
_COUNTED = 3
_CAST_BYTES = 2


class Job:
    """What a rank has to do."""

    def __init__(self, layout: Layout, rank: int, rounds: int, small: bool) -> None:
        self.layout, self.rank, self.rounds, self.small = layout, rank, rounds, small
        self.device = torch.device("cpu") if small else torch.device("cuda", rank)
        self.clock = seconds_of if small else seconds_on_device
        self.memory: dict[str, int] = {}

    def run(self) -> Outcome:
        """*Collective.*"""
        with tempfile.TemporaryDirectory() as folder:
            engine = self._engine(Path(folder))
        dist.barrier()  # engines measure what is free when they start
        config = models.config_of(self.layout.shape, torch.float32, small=self.small)
        actor = ShardedActor(self.layout.trainer, config, self.device)
        free()
        outcome = Outcome(case=self.layout.name, tensors=len(actor.shapes))
        outcome.nbytes = sum(torch.Size(shape).numel() for shape in actor.shapes.values()) * _CAST_BYTES
        self._note("trainer and engine")
        with wsync.connect(actor.module, engine, config=self._settings()) as session:
            first = session.sync()
            self._note("after the first sync")
            outcome.facts["transport"] = first.transport
            reports: list[SyncReport] = []
            references = self._references(actor)
            outcome.samples = in_turn(lambda: reports.append(session.sync()), references, self.rounds, self.clock)
            del references
            free()
            self._split(outcome, reports[-self.rounds :])
            self._count(outcome, session, actor)
            self._note("peak", peak=True)
            said = list[Answers]()
            for seed in _SEEDS:
                expected = models.greedy(actor.renew(seed), engines.prompts(), engines.NEW_TOKENS)
                session.sync()
                right = engine is None or says(engine, expected, said)
                outcome.checks[f"tokens of weights {seed}, of every engine"] = all(told(right))
        outcome.facts["device bytes by rank"] = told(self.memory)
        return outcome

    def _engine(self, folder: Path) -> Any:
        if self.rank not in self.layout.owners:
            return None
        places = self.layout.places(self.layout.owners.index(self.rank))
        config = models.config_of(self.layout.shape, torch.bfloat16, small=self.small)
        checkpoint = models.make_folder(config, folder)
        if self.small:
            return _on_cpu(checkpoint, self.layout.tp)
        before = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, places))  # for its processes: this one has its device
        try:
            return engines.start_vllm(checkpoint, "bfloat16", workers=self.layout.tp)
        finally:
            if before is None:
                del os.environ["CUDA_VISIBLE_DEVICES"]
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = before

    def _settings(self) -> wsync.SyncConfig:
        if self.layout.apart:
            transport = "gloo" if self.small else "nccl"
            return wsync.SyncConfig(path="buckets", transport=transport, senders=self.layout.ranks, num_slots=4)
        return wsync.SyncConfig(path=self.layout.path)

    def _references(self, actor: ShardedActor) -> Mapping[str, Way]:
        found: dict[str, Way] = {EACH: actor.gather_each()}
        if self.small:
            return found
        if self.layout.trainer != "zero3":
            found[PACKED] = packed_gather(actor.module, torch.bfloat16, 256 * MIB)
        numels = scaling_floors.needed(actor.shapes, self.layout)
        found[LOCAL] = cast(numels[self.rank], torch.float32, torch.bfloat16)
        across = scaling_floors.crossing(actor.shapes, self.layout)
        if across is not None and any(across):
            found[LINK] = _from_rank_0(self.rank, lambda: bring(across))
        return found

    def _split(self, outcome: Outcome, reports: list[SyncReport]) -> None:
        """Seconds in which bytes moved, on the rank that needed most, and the others."""
        everybody = told([_moving(report) for report in reports])
        outcome.data_seconds = [max(each) for each in zip(*everybody, strict=True)]
        outcome.facts["control seconds"] = [
            report.seconds - moved for report, moved in zip(reports, outcome.data_seconds, strict=True)
        ]
        outcome.facts["stages of the last sync, s, by rank"] = told(dict(reports[-1].stages))

    def _count(self, outcome: Outcome, session: wsync.Session, actor: ShardedActor) -> None:
        """Bytes that workers read, and that links brought, in a sync."""
        before = None if self.small else received_bytes()
        dist.barrier()
        reports = [session.sync() for _ in range(_COUNTED)]
        dist.barrier()
        after = None if self.small else received_bytes()
        outcome.facts["bytes that workers read"] = sum(int(nbytes) for nbytes in told(reports[-1].pulled_nbytes))
        across = scaling_floors.crossing(actor.shapes, self.layout)
        if across is not None:
            outcome.facts["bytes that must cross to each device"] = [numel * _CAST_BYTES for numel in across]
        if before is not None and after is not None:
            each = [(now - then) / _COUNTED for then, now in zip(before, after, strict=True)]
            outcome.facts["bytes that each device received in a sync"] = each

    def _note(self, when: str, *, peak: bool = False) -> None:
        """Bytes in use on this rank's device, by whomever; at the peak, of torch here."""
        if self.device.type == "cuda":
            free_bytes, total = torch.cuda.mem_get_info()
            self.memory[when] = torch.cuda.max_memory_allocated() if peak else total - free_bytes


def told(mine: Any) -> list[Any]:
    """*Collective.* What every rank says."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def _moving(report: SyncReport) -> float:
    if "worker read" in report.stages:
        return report.stages.get("cast", 0.0) + report.stages["worker read"]
    return report.seconds - report.control_seconds


def _from_rank_0(rank: int, make: Callable[[], Way]) -> Way:
    """All devices' copies, which one process starts; the others wait for it."""
    way = make() if rank == 0 else None

    def run() -> None:
        if way is not None:
            way()
        dist.barrier()

    return run


def _on_cpu(folder: Path, workers: int) -> Any:
    from vllm import LLM

    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=128,
        kv_cache_memory_bytes=64 << 20,
        tensor_parallel_size=workers,
        worker_extension_cls="examples.vllm_plain_weights.PlainWeights",
    )


def main(name: str, gpus: int, rank: int, port: int, out: Path, rounds: int, small: bool) -> None:
    """Join the others and run it; rank 0 writes the outcome."""
    [layout] = [one for one in layouts(gpus) if one.name == name]
    patience = timedelta(seconds=_TIMEOUT_S)
    store = TCPStore(_LOOPBACK, port, None, rank == 0, patience, False)
    if not small:
        torch.cuda.set_device(rank)
    backend = "gloo" if small else "cpu:gloo,cuda:nccl"
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(layout.ranks)}  # DeepSpeed asks
    dist.init_process_group(
        backend, store=PrefixStore("ranks", store), rank=rank, world_size=layout.ranks, timeout=patience
    )
    outcome = Job(layout, rank, rounds, small).run()
    if rank == 0:
        unfinished = out.with_suffix(".part")
        unfinished.write_text(json.dumps(outcome.as_json()))
        unfinished.replace(out)
    dist.barrier()


if __name__ == "__main__":
    named, gpus, rank, port, file, rounds, small = sys.argv[1:]
    main(named, int(gpus), int(rank), int(port), Path(file), int(rounds), bool(int(small)))
    sys.stdout.flush()
    os._exit(0)  # engines' and groups' own threads would have a say in the end
