"""From a job to a row: the engine's process, the trainer's ranks, one deadline for all of it."""

import multiprocessing as mp
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection

from wsync.bench.host import hosted
from wsync.bench.job import Job, Row
from wsync.bench.take import take
from wsync.testing.ranks import RanksFailed, run_ranks

_PRELOADED = ("wsync.bench.take", "wsync.adapters.trainers.module", "torch.distributed.fsdp")

OnProgress = Callable[[str, int, int], None]


def prepare() -> None:
    """Start the process that all others are forked from, with what they all need. Once, before the first row."""
    mp.get_context("forkserver").set_forkserver_preload(list(_PRELOADED))
    forkserver.ensure_running()


def measure(job: Job, on_progress: OnProgress) -> Row:
    """Run `job` in processes of its own, all of which are gone afterwards. What fails in them is the row's error.

    `on_progress`: (what is done now, steps done, steps in all), on a thread of its own.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        hosted(job.shapes, job.dtype) if job.remote else nullcontext() as pipe,
        _listening(on_progress) as progress,
    ):
        try:
            taken, *_ = run_ranks(take, job.ranks, job, folder, pipe, progress, timeout_s=job.timeout_s)
        except RanksFailed as error:
            return Row(job=job, error=str(error))
    return Row(job=job, taken=taken)


@contextmanager
def _listening(on_progress: OnProgress) -> Iterator[Connection]:
    """The end of a pipe for the ranks. What comes out of it goes to `on_progress`."""
    ours, theirs = mp.Pipe(duplex=False)

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                on_progress(*ours.recv())

    thread = threading.Thread(target=listen, name="bench progress", daemon=True)
    thread.start()
    try:
        yield theirs
    finally:
        theirs.close()
        thread.join()
        ours.close()
