"""One way to start test processes: forked from a server that has imported the slow things once."""

import multiprocessing as mp
from multiprocessing.context import ForkServerContext

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
