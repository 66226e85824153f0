"""Two ranks that train with FSDP2 in fp32, each on a GPU, and a vLLM beside each: gathered over NCCL, in buckets.

Run as a program it is the other rank: `python -m wsync.bench.gpu.gathered PORT NAME ROUNDS SMALL`.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

import wsync
from wsync.bench.gpu import engines, models, workers
from wsync.bench.gpu.checks import UNMOVED, Answers, free, outcome_of, says
from wsync.bench.gpu.far import GPU, LOOPBACK
from wsync.bench.gpu.gather_loops import packed_gather, send_full_tensors
from wsync.bench.gpu.outcome import Limit, Outcome, in_turn
from wsync.bench.gpu.pulls import PULL, timed
from wsync.bench.gpu.sharded_pull import renew, sharded
from wsync.bench.samples import Way
from wsync.config import MIB

GATHER, FULL_EACH = "packed all-gather", "full_tensor each"

_GATHER_BYTES = 256 * MIB
_BUCKETS = (1024 * MIB, 256 * MIB)
"""The first is measured beside the others: processes that take turns on a device do so twice a bucket."""

_TIMEOUT_S, _END_S = 240.0, 20.0
_FEW = 4


def measure(name: str, rounds: int, *, small: bool = False) -> Outcome:
    """The case, as rank 0 sees it."""
    store = TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=_TIMEOUT_S), False)
    arguments = (str(store.port), name, str(rounds), str(int(small)))
    command = ["env", f"CUDA_VISIBLE_DEVICES={GPU},0", sys.executable, "-m", "wsync.bench.gpu.gathered", *arguments]
    other = subprocess.Popen(command)
    try:
        outcome = _on_rank(0, store, name, rounds, small)
        other.wait(_END_S)
    finally:
        other.kill()
        other.wait()
    return outcome


def _on_rank(rank: int, store: Store, name: str, rounds: int, small: bool) -> Outcome:
    torch.cuda.set_device(0)
    patience = timedelta(seconds=_TIMEOUT_S)
    ranks = PrefixStore("ranks", store)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=ranks, rank=rank, world_size=2, timeout=patience)
    wire, own = torch.bfloat16, torch.float32
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = models.make_folder(models.config_of(models.DENSE, wire, small=small), Path(folder))
        engine = engines.start_vllm(checkpoint, "bfloat16")
    _all(True)  # an engine measures what is free when it starts
    places = workers.places_of(engine)
    config = models.config_of(models.DENSE, own, small=small)
    full = models.make_actor(config, own, 1)
    limits = (Limit(reference=GATHER, factor=1.4), Limit(reference=FULL_EACH, factor=0.25))
    outcome = outcome_of(name, full, wire, limits)
    actor = sharded(full)
    del full
    free()
    free_bytes = torch.cuda.mem_get_info()[0]
    with wsync.connect(actor, engine, config=_settings(_BUCKETS[0])) as session:
        session.sync()
        outcome.facts["device bytes taken"] = free_bytes - torch.cuda.mem_get_info()[0]
        references: Mapping[str, Way] = {
            GATHER: packed_gather(actor, wire, _GATHER_BYTES),
            FULL_EACH: partial(send_full_tensors, engine, actor, wire),
        }
        outcome.samples = in_turn(session.sync, references, rounds)
        outcome.facts["stages of the last sync, s"] = dict(session.sync().stages)
        del references
        free()
        said = list[Answers]()
        for seed in (2, 3, 4):
            expected = renew(actor, config, seed)
            session.sync()
            outcome.checks[f"tokens of weights {seed}, on both"] = _all(says(engine, expected, said))
    with wsync.connect(actor, engine, config=_settings(_BUCKETS[1])) as session:
        outcome.facts[f"seconds in buckets of {_BUCKETS[1]} bytes"] = in_turn(session.sync, {}, _FEW).median_s
    with wsync.connect(actor, engine, config=PULL) as session:
        pulled = outcome_of(name, actor, wire, ())
        outcome.facts["seconds if it is pulled"] = in_turn(lambda: timed(pulled, session), {}, _FEW).median_s
        outcome.facts["of which bytes moved, each time"] = pulled.data_seconds[-_FEW:]
    outcome.checks[f"{UNMOVED}, on both"] = _all(workers.places_of(engine) == places)
    return outcome


def _settings(bucket_bytes: int) -> wsync.SyncConfig:
    return wsync.SyncConfig(path="buckets", bucket_bytes=bucket_bytes, num_slots=2)


def _all(right: bool) -> bool:
    """*Collective.* Whether it is so on both ranks."""
    wrong = torch.tensor(int(not right))
    dist.all_reduce(wrong)
    return not wrong


def main(port: int, name: str, rounds: int, small: bool) -> None:
    """The other rank."""
    store = TCPStore(LOOPBACK, port, None, False, timedelta(seconds=_TIMEOUT_S), False)
    _on_rank(1, store, name, rounds, small)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), bool(int(sys.argv[4])))
    sys.stdout.flush()
    os._exit(0)  # engines' and groups' own threads would have a say in the end
