"""Weights that workers pull from another process on the same GPU: how long the copies take, and what stays mapped."""

import tempfile
from pathlib import Path

import torch

import wsync
from wsync.bench.gpu import engines, models, workers
from wsync.bench.gpu.checks import Answers, check_places, check_tokens, free, in_place, outcome_of, says
from wsync.bench.gpu.outcome import COPY, Limit, Outcome, copies, in_turn
from wsync.config import MIB
from wsync.report import SyncReport
from wsync.session import Session

PULL = wsync.SyncConfig(path="pull")
EXTRA_BYTES = 64 * MIB
"""Most device memory that a session that pulls may take."""

_OFFLOADS = 10
_FLAT_BYTES = 32 * MIB


def timed(outcome: Outcome, session: Session) -> SyncReport:
    """One sync, of which the time in which bytes moved is kept beside that of the call."""
    report = session.sync()
    outcome.data_seconds.append(moving(report))
    return report


def moving(report: SyncReport) -> float:
    """Seconds in which bytes moved: workers read once all that crosses a link has been cast."""
    return report.stages.get("cast", 0.0) + report.stages["worker read"]


def from_another_process(name: str, shape: str, factor: float, rounds: int) -> Outcome:
    """A module in bf16 into a vLLM with processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        config = models.config_of(shape, torch.bfloat16)
        engine = engines.start_vllm(models.make_folder(config, Path(folder)), "bfloat16")
        actor = models.make_actor(config, torch.bfloat16, 1)
        outcome = outcome_of(name, actor, torch.bfloat16, (Limit(reference=COPY, factor=factor, data=True),))
        free()
        free_bytes = torch.cuda.mem_get_info()[0]
        with in_place(outcome, engine), wsync.connect(actor, engine, config=PULL) as session:
            first = session.sync()
            outcome.facts["seconds to map, at first"] = first.stages["worker map"]
            outcome.checks["each byte is read once"] = first.pulled_nbytes == outcome.nbytes
            taken = free_bytes - torch.cuda.mem_get_info()[0]
            outcome.facts["device bytes taken"] = taken
            outcome.checks["takes at most 64 MiB"] = taken <= EXTRA_BYTES
            references = {COPY: copies(outcome.nbytes, 1)}
            outcome.samples = in_turn(lambda: timed(outcome, session), references, rounds)
            outcome.data_seconds = outcome.data_seconds[-rounds:]
            last = session.sync()
            outcome.facts["stages of the last sync, s"] = dict(last.stages)
            outcome.facts["seconds in which nothing was read"] = last.seconds - last.stages["worker read"]
            outcome.checks["nothing was mapped anew"] = last.stages["worker map"] == 0
            del references
            free()
            check_tokens(outcome, session, actor, engine)
    return outcome


def with_offloads(name: str) -> Outcome:
    """The actor leaves for host memory between syncs; ten times the device has its memory back."""
    with tempfile.TemporaryDirectory() as folder:
        config = models.config_of(models.DENSE, torch.bfloat16, layers=4)
        engine = engines.start_vllm(models.make_folder(config, Path(folder)), "bfloat16", sleep=True)
        actor = models.make_actor(config, torch.bfloat16, 1)
        outcome = outcome_of(name, actor, torch.bfloat16, ())
        places = workers.places_of(engine)
        memory = wsync.MemoryManager(engine=engine, models={"actor": actor})
        away, there, mapping, said = list[int](), list[int](), list[float](), list[Answers]()
        right = True
        for seed in range(2, 2 + _OFFLOADS):
            memory.enter("train")
            models.randomize(actor, seed)
            expected = models.greedy(actor, engines.prompts(), engines.NEW_TOKENS)
            report = wsync.sync(actor, engine, config=PULL, memory=memory)
            mapping.append(report.stages["worker map"])
            away.append(torch.cuda.mem_get_info()[0])
            with memory.using("actor"):
                there.append(torch.cuda.mem_get_info()[0])
            right = says(engine, expected, said) and right
        outcome.facts |= {
            "free bytes without the actor": away,
            "free bytes with it": there,
            "seconds to map, each time": mapping,
        }
        outcome.checks["tokens after every sync"] = right
        check_places(outcome, engine, places)
        freed = [without - beside for without, beside in zip(away, there, strict=True)]
        outcome.checks["the device has its memory back each time"] = min(freed) >= outcome.nbytes
        outcome.checks["and no less from time to time"] = max(away[1:]) - min(away[1:]) <= _FLAT_BYTES
    return outcome
