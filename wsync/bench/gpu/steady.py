"""200 syncs of a small model: what is held after them is what was held before, and none of them allocated anything."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import wsync
from wsync.bench.gpu import workers
from wsync.bench.gpu.checks import check_tokens, held, small_vllm
from wsync.bench.gpu.outcome import Outcome
from wsync.bench.gpu.pulls import PULL
from wsync.config import MIB
from wsync.session import Session

SYNCS = 200
_WARM_UP = 20
"""More than the rings and lists of addresses take to come around, and than torch takes to settle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the weights go."""

    config: wsync.SyncConfig
    explained: str
    """What `Session.explain` says of it."""


IN_PROCESS = Way(config=wsync.SyncConfig(), explained="read where the trainer has it")
REFERENCES = Way(config=wsync.SyncConfig(transport="cuda_ipc"), explained="read where the trainer has it")
SLOTS = Way(
    config=wsync.SyncConfig(transport="cuda_ipc", path="buckets", bucket_bytes=MIB),
    explained="in buckets, because",
)
"""Slots so small that every sync goes around the ring more than once."""

PULLED = Way(config=PULL, explained="pulled: ")


def measure(name: str, way: Way) -> Outcome:
    """A module in bf16 into a vLLM, of this process or not."""
    with (
        small_vllm(name, torch.bfloat16) as (engine, actor, outcome),
        wsync.connect(actor, engine, config=way.config) as session,
    ):
        outcome.checks["goes the way of this case"] = way.explained in session.explain()
        check_held(outcome, session, [worker.pid for worker in workers.seen(engine)])
        check_tokens(outcome, session, actor, engine)
    return outcome


def check_held(outcome: Outcome, session: Session, pids: Sequence[int]) -> None:
    """Sync on and on, with a look at this process and at those of `pids` before and after."""
    for _ in range(_WARM_UP):
        session.sync()
    before, allocated = held(pids), _allocations()
    for _ in range(SYNCS):
        session.sync()
    more, after = _allocations() - allocated, held(pids)
    outcome.facts |= {"before": before, "after": after, f"device allocations of the trainer in {SYNCS} syncs": more}
    outcome.checks[f"{SYNCS} syncs hold nothing more"] = before == after
    outcome.checks[f"{SYNCS} syncs allocate nothing on the device"] = more == 0


def _allocations() -> int:
    """How many this process has made since it started."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])
