"""Two ranks that train with FSDP2 in fp32, each on a GPU, and a vLLM of two workers on the same two: shard to shard.

What a worker needs lies on its own device, but for half of the weights that vLLM cuts by columns: those its owner casts
before they cross. Floors are measured in the same run: all that a device reads in fp32 and writes in bf16, for its own
worker and for the other one, and bringing as many bytes in bf16 over the link.
"""

import multiprocessing as mp
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import wsync
from wsync.bench.gpu import engines, models
from wsync.bench.gpu.checks import Answers, free, in_place, outcome_of, says
from wsync.bench.gpu.links import bring, received_bytes
from wsync.bench.gpu.outcome import WARM_UP, Limit, Outcome, cast, in_turn
from wsync.bench.gpu.pulls import EXTRA_BYTES, PULL, moving, timed
from wsync.report import SyncReport

FLOOR = "the larger floor"
LOCAL, LINK = "local floor", "link floor"

_LOOPBACK, _STARTED = "127.0.0.1", "engine has started"
_TIMEOUT_S, _END_S = 420.0, 20.0
_NORMS = ("norm.weight",)
_LAST = 3
_CONTROL_S = 3e-3
_NEAR = 0.02
_FP32, _BF16 = torch.float32.itemsize, torch.bfloat16.itemsize


def measure(name: str, rounds: int, *, small: bool = False) -> Outcome:
    """The case. This process is rank 0, owns the engine, and measures; rank 1 is a process beside it."""
    store = TCPStore(_LOOPBACK, 0, None, True, timedelta(seconds=_TIMEOUT_S), False)
    other = mp.get_context("spawn").Process(target=_other, args=(store.port, name, rounds, small), daemon=True)
    other.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcome = _on_rank(0, store, name, rounds, small, Path(folder))
        other.join(_END_S)
    finally:
        other.kill()
        other.join()
    return outcome


def _other(port: int, name: str, rounds: int, small: bool) -> None:
    store = TCPStore(_LOOPBACK, port, None, False, timedelta(seconds=_TIMEOUT_S), False)
    _on_rank(1, store, name, rounds, small)
    os._exit(0)  # a gloo rank that runs the interpreter's own exit may abort in a destructor


def _on_rank(rank: int, store: Store, name: str, rounds: int, small: bool, folder: Path | None = None) -> Outcome:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    patience = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", store=PrefixStore("ranks", store), rank=rank, world_size=2, timeout=patience)
    wire, own = torch.bfloat16, torch.float32
    engine = None
    if folder is not None:
        checkpoint = models.make_folder(models.config_of(models.DENSE, wire, small=small), folder)
        engine = engines.start_vllm(checkpoint, "bfloat16", workers=2)
        store.set(_STARTED, "")
    store.wait([_STARTED], patience)  # the engine measures what is free when it starts
    config = models.config_of(models.DENSE, own, small=small)
    full = models.make_actor(config, own, 1, str(device))
    outcome = outcome_of(name, full, wire, (Limit(reference=FLOOR, factor=1.5, data=True),))
    actor = sharded(full)
    del full
    free()
    free_bytes = torch.cuda.mem_get_info()[0]
    unmoved = nullcontext() if engine is None else in_place(outcome, engine)
    with unmoved, wsync.connect(actor, engine, config=PULL) as session:
        first = session.sync()
        taken = free_bytes - torch.cuda.mem_get_info()[0]
        outcome.facts["seconds to map, at first"] = first.stages.get("worker map")
        outcome.facts |= {"device bytes taken": taken, "of them for casts": first.peak_bytes}
        outcome.checks["takes at most 64 MiB beside its casts"] = taken <= EXTRA_BYTES + first.peak_bytes
        if engine is not None:
            _sample(outcome, session, actor, rounds)
        else:
            for _ in range(_syncs(rounds)):
                session.sync()
        said = list[Answers]()
        for seed in (2, 3, 4):
            expected = renew(actor, config, seed)
            session.sync()
            if engine is not None:
                outcome.checks[f"tokens of weights {seed}"] = says(engine, expected, said)
    return outcome


def sharded(model: nn.Module) -> nn.Module:
    """The same module under FSDP2 on all ranks: each decoder layer, and what is left."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@torch.no_grad()
def renew(actor: nn.Module, config: Any, seed: int) -> list[list[int]]:
    """Give every rank's shards new weights, and return what transformers says with them, rounded to bf16."""
    rank, world = dist.get_rank(), dist.get_world_size()
    full = models.make_actor(config, torch.float32, seed, f"cuda:{torch.cuda.current_device()}")
    for (_, shard), (_, whole) in zip(actor.named_parameters(), full.named_parameters(), strict=True):
        assert isinstance(shard, DTensor)
        parts = whole.chunk(world)
        shard.to_local().copy_(parts[rank] if rank < len(parts) else whole[:0])
    return models.greedy(full.to(torch.bfloat16), engines.prompts(), engines.NEW_TOKENS)


def _syncs(rounds: int) -> int:
    """How many syncs `_sample` makes."""
    return WARM_UP + rounds + _LAST


def _sample(outcome: Outcome, session: wsync.Session, actor: nn.Module, rounds: int) -> None:
    crossing, staying = _elements(outcome.nbytes // 2, actor)
    references = {LOCAL: cast(staying + crossing, torch.float32, torch.bfloat16), LINK: bring([crossing, crossing])}
    outcome.samples = in_turn(lambda: timed(outcome, session), references, rounds)
    outcome.data_seconds = outcome.data_seconds[-rounds:]
    found = outcome.samples.references
    larger = max(LOCAL, LINK, key=outcome.samples.reference_median_s)
    outcome.samples = replace(outcome.samples, references={**found, FLOOR: found[larger]})
    copied = _received(references[LINK])
    reports: list[SyncReport] = []
    moved = _received(lambda: reports.append(session.sync()))
    control = [report.seconds - moving(report) for report in reports]
    outcome.facts |= {
        "stages of the last sync, s": dict(reports[-1].stages),
        "seconds in which nothing was read or cast": control,
        "bytes that must cross to each worker": crossing * _BF16,
        "bytes that the devices received in a sync": moved,
        "bytes that they received of plain copies of as many": copied,
    }
    outcome.checks[f"control at most {_CONTROL_S * 1e3:g} ms"] = min(control) <= _CONTROL_S
    least = 2 * (staying * _FP32 + crossing * _BF16)  # norms by both workers, all else by one of them
    outcome.checks["each element is read once, in bf16 if it crosses"] = reports[-1].pulled_nbytes == least
    if moved and copied:
        outcome.checks["link bytes within 2% of the plan's, as plain copies count"] = moved <= copied * (1 + _NEAR)


def _received(way: Callable[[], object]) -> float | None:
    """Bytes that both devices together received in one call, of a few; None where they do not count."""
    before = received_bytes()
    for _ in range(_LAST):
        way()
    after = received_bytes()
    return None if before is None or after is None else (sum(after) - sum(before)) / _LAST


def _elements(numel: int, actor: nn.Module) -> tuple[int, int]:
    """How many of the elements that one worker of two needs lie on the other rank, and on its own."""
    columns = _numel(actor, ("o_proj.weight", "down_proj.weight"))
    return columns // 4 + _numel(actor, _NORMS) // 2, numel // 2 - columns // 4


def _numel(actor: nn.Module, names: tuple[str, ...]) -> int:
    """Of all parameters whose names end so."""
    return sum(parameter.numel() for name, parameter in actor.named_parameters() if name.endswith(names))
