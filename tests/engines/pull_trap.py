"""A trap for a worker that pulls: in the middle of what it reads of a trainer rank, a process gets a signal.

The worker itself sends it, and writes down how far it was: no test can be early or late.
"""

import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wsync.pull import host_reads
from wsync.transports.link import ready

_PROBE_BYTES = 64
_PATIENCE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """Who walks into it, and what happens."""

    worker: int
    """Rank of the worker, among those of its engine."""

    source: int
    """Id of the trainer process that it reads then."""

    number: int
    """The signal."""

    victim: int = 0
    """Id of the process that gets it; 0: the worker."""

    goes_on: bool = False
    """Whether the victim, which was stopped, goes on when the worker has read the rest."""

    note: str
    """File for what the worker knows of it: {"worker": its id, "read": bytes, "of": bytes}."""

    def as_message(self) -> dict[str, Any]:
        """Plain values, for any remote procedure call."""
        return asdict(self)


def set_trap(trap: Trap, rank: int) -> None:
    """In the worker `rank`: it springs at the next pull, once, and is gone then."""
    if rank != trap.worker:
        return
    healthy = host_reads._read_runs

    def read_runs(pid: int, moves: Any) -> None:
        total = sum(len(froms) * nbytes for froms, _, nbytes in moves)
        if pid != trap.source or total <= _PROBE_BYTES:
            healthy(pid, moves)
            return
        host_reads._read_runs = healthy
        halves = [(froms, tos, nbytes // 2) for froms, tos, nbytes in moves if nbytes > 1]
        healthy(pid, halves)
        known = sum(len(froms) * nbytes for froms, _, nbytes in halves)
        _note(Path(trap.note), {"worker": os.getpid(), "read": known, "of": total})
        _strike(trap.victim or os.getpid(), trap.number)
        healthy(pid, moves)
        if trap.goes_on:
            os.kill(trap.victim, signal.SIGCONT)

    host_reads._read_runs = read_runs


def _note(file: Path, words: dict[str, int]) -> None:
    scratch = file.with_suffix(".scratch")
    scratch.write_text(json.dumps(words))
    scratch.replace(file)


def _strike(victim: int, number: int) -> None:
    """Returns when the victim is dead or stopped."""
    pidfd = os.pidfd_open(victim)
    try:
        os.kill(victim, number)
        if number == signal.SIGKILL:
            assert ready([pidfd], _PATIENCE_S), f"process {victim} does not die"
        elif victim != os.getpid():
            expires = time.monotonic() + _PATIENCE_S
            while _state(victim) != "T":
                assert time.monotonic() < expires, f"process {victim} does not stop"
    finally:
        os.close(pidfd)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
