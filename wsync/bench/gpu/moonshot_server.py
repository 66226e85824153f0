"""Program: checkpoint-engine's parameter server beside a model.

    python -m wsync.bench.gpu.moonshot_server FD SHAPE DTYPE

`wsync.bench.gpu.moonshot.Moonshot` is at the other end of FD. vLLM's workers import `Extension` from here.
"""

import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import checkpoint_engine.ps
import torch
from checkpoint_engine.worker import VllmColocateWorkerExtension

from wsync.bench.gpu import models
from wsync.bench.gpu.far_end import answer, ask
from wsync.bench.gpu.loops import LoopExtension

_NAME = "actor"
_HERE = "127.0.0.1"


class Extension(LoopExtension, VllmColocateWorkerExtension):  # type: ignore[misc]
    """wsync's extension and checkpoint-engine's: vLLM takes one."""


class Server:
    """Answers `Moonshot`."""

    def __init__(self, pipe: Connection, shape: str, dtype: torch.dtype) -> None:
        self._pipe = pipe
        self._actor = models.make_actor(models.config_of(shape, dtype), dtype, 1)
        # The address is for other hosts, and finding it takes a network.
        checkpoint_engine.ps.get_ip = lambda: _HERE
        self._server: Any = checkpoint_engine.ps.ParameterServer(
            rank=0, world_size=1, auto_pg=False, master_addr=_HERE, master_port=0
        )
        self._server.init_process_group()
        self._registered = False

    def randomize(self, seed: int) -> None:
        """See `Moonshot`."""
        models.randomize(self._actor, seed)

    def register(self) -> float:
        """See `Moonshot`."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        if self._registered:
            self._server.unregister_checkpoint(_NAME)  # the pool of pinned memory stays
        weights = dict(models.engine_side(self._actor))
        self._server.register_checkpoint(_NAME, named_tensors=weights, use_shared_memory_pool=True)
        self._server.gather_metas(_NAME)
        self._registered = True
        return time.perf_counter() - start

    def update(self) -> float:
        """See `Moonshot`."""
        start = time.perf_counter()
        self._server.update(_NAME, self._ask)
        return time.perf_counter() - start

    def _ask(self, sockets: Sequence[tuple[str, str]]) -> None:
        """Have the engine's workers listen, by device; returns when they are through."""
        ask(self._pipe, dict(sockets))


def main(fd: int, shape: str, dtype: str) -> None:
    """Answer until the other side closes the pipe."""
    pipe = Connection(fd)
    answer(pipe, lambda: Server(pipe, shape, getattr(torch, dtype.removeprefix("torch."))))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
