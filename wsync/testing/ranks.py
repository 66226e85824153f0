"""Run a function on N real ranks, each a process of its own with a gloo group, under one deadline.

    results = run_ranks(check_layout, 2, "fsdp2", timeout_s=60)

The store lives in the calling process, bound to a free port of the loopback interface, so it outlives any rank.
"""

import contextlib
import faulthandler
import multiprocessing as mp
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from wsync.testing.processes import forkserver

LOOPBACK = "127.0.0.1"
GRACE_S = 5.0
"""How long the other ranks may go on after one has failed: they should report what they saw of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What `run_ranks` hands to the function on each rank. The default process group is initialised."""

    rank: int
    world_size: int
    store: Store
    """Shared by all ranks; the default group uses it under a prefix of its own."""


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not end in time. The message has every rank's words."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float,
    expected_dead: Collection[int] = (),
) -> list[Any]:
    """Call `fn(Rank, *args)` on `world_size` new processes and return their results by rank.

    Args:
        fn: importable function; it and `args` and results are pickled by `multiprocessing`.
        world_size: number of processes.
        args: passed on after the `Rank`.
        timeout_s: seconds until every rank must have returned. Ranks still alive then are killed.
        expected_dead: ranks that `fn` kills on purpose. Their result is None; returning is an error for them.

    Raises:
        RanksFailed: with the traceback, exit code or absence of each rank that failed.
    """
    listener = socket.create_server((LOOPBACK, 0), backlog=world_size)
    port = int(listener.getsockname()[1])
    # The store owns the descriptor from here on and closes it.
    server = TCPStore(
        LOOPBACK, port, None, True, timedelta(seconds=timeout_s), False, master_listen_fd=listener.detach()
    )
    context = forkserver()
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(world_size):
            ours, theirs = mp.Pipe()
            process: BaseProcess = context.Process(
                target=_rank_main, args=(theirs, port, rank, world_size, timeout_s, fn, args), daemon=True
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        return _collect(ranks, time.monotonic() + timeout_s, timeout_s, expected_dead)
    finally:
        for process, pipe in ranks:
            process.kill()
            process.join()
            process.close()
            pipe.close()
        del server


def _collect(
    ranks: Sequence[tuple[BaseProcess, Connection]], expires: float, timeout_s: float, expected_dead: Collection[int]
) -> list[Any]:
    """Wait for one report from each rank, let them go, and wait until they are gone."""
    results: list[Any] = [None] * len(ranks)
    failures: dict[int, str] = {}
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), max(0.0, expires - time.monotonic()))
        if not ready:
            still = (
                f"still ran {GRACE_S:g} s after the first failure"
                if failures
                else f"did not end within {timeout_s:g} s"
            )
            failures |= dict.fromkeys(waiting.values(), still)
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            ok, value = _report(pipe, ranks[rank][0], expires)
            if ok == (rank in expected_dead):
                failures[rank] = "returned, but was expected to die" if ok else str(value)
                expires = min(expires, time.monotonic() + GRACE_S)
            elif ok:
                results[rank] = value
    if failures:
        words = "\n".join(f"--- rank {rank} of {len(ranks)}: {failures[rank]}" for rank in sorted(failures))
        raise RanksFailed(f"{len(failures)} of {len(ranks)} ranks failed\n{words}")
    _dismiss(ranks, expires)
    return results


def _report(pipe: Connection, process: BaseProcess, expires: float) -> tuple[bool, Any]:
    """(True, result) or (False, what went wrong). A dead rank closes its end without a word."""
    try:
        message: tuple[bool, Any] = pipe.recv()
    except EOFError:
        process.join(max(0.1, expires - time.monotonic()))
        return False, f"died without a word, exit code {process.exitcode}"
    return message


def _dismiss(ranks: Sequence[tuple[BaseProcess, Connection]], expires: float) -> None:
    """Let ranks tear their groups down together, once none needs another any more."""
    for _, pipe in ranks:
        with contextlib.suppress(BrokenPipeError):
            pipe.send(None)
    for process, _ in ranks:
        process.join(max(0.1, expires - time.monotonic()))


def _rank_main(
    pipe: Connection,
    port: int,
    rank: int,
    world_size: int,
    timeout_s: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Body of a rank: group up, call, report, wait for the dismissal, leave without running exit handlers."""
    status = 0
    try:
        torch.set_num_threads(1)
        faulthandler.dump_traceback_later(0.9 * timeout_s)
        patience = timedelta(seconds=timeout_s)
        store = TCPStore(LOOPBACK, port, None, False, patience, False)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", store=PrefixStore("default", store), rank=rank, world_size=world_size, timeout=patience
        )
        pipe.send((True, fn(Rank(rank=rank, world_size=world_size, store=store), *args)))
    except BaseException:
        status = 1
        pipe.send((False, traceback.format_exc()))
    with contextlib.suppress(EOFError):
        pipe.recv()
        if dist.is_initialized():
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # A gloo rank that runs the interpreter's own exit may abort in a destructor.
    os._exit(status)
