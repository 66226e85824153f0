"""How processes of tests start, forked from a server that has imported the slow things once, and how they end."""

import multiprocessing as mp
import os
import signal
import subprocess
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path

_PRELOADED = (
    "wsync.testing.actors",
    "wsync.adapters.trainers.fsdp",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "transformers.generation",
)
"""Modules that most tests need. One that is not installed is passed over."""


def forkserver() -> ForkServerContext:
    """The start method. Importing torch and transformers takes longer than most tests."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def end(program: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of it: all below it, as torchrun puts ranks in sessions of their own, and its own session.

    `program` was started with `start_new_session`.
    """
    with suppress(ProcessLookupError):
        for pid in _below(program.pid):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


def _below(pid: int) -> list[int]:
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [*children, *(grandchild for child in children for grandchild in _below(child))]
