"""Program: the receiving rank of bare NCCL broadcasts, and the sending one to import.

python -m wsync.bench.gpu.raw_peer FD PORT
"""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from wsync.bench.gpu.far import LOOPBACK
from wsync.bench.gpu.far_end import answer
from wsync.memory.sizes import GIB

_TIMEOUT_S = 200.0


class RawRank:
    """One of two ranks of a group of torch's, with a buffer of a GiB on the current device."""

    def __init__(self, store: Store, rank: int) -> None:
        make: Any = dist.ProcessGroupNCCL
        self._group = make(PrefixStore("raw", store), rank, 2, make.Options())
        self._how = dist.BroadcastOptions()
        self._how.rootRank = 0
        self._buffer = torch.empty(GIB, dtype=torch.uint8, device="cuda")

    def broadcast(self, nbytes: int) -> None:
        """As many bytes, in buffers. Returns when they are queued."""
        works = [self._group.broadcast([self._buffer[:size]], self._how) for size in sizes_of(nbytes)]
        for work in works:
            work.wait()  # for the current stream, not for the host

    def receive(self, nbytes: int) -> None:
        """The same for the other rank. Returns when they are here."""
        self.broadcast(nbytes)
        torch.cuda.synchronize()


def sizes_of(nbytes: int) -> Sequence[int]:
    """Of the buffers that `nbytes` take."""
    return [min(GIB, nbytes - start) for start in range(0, nbytes, GIB)]


def main(fd: int, port: int) -> None:
    """Answer until the other side closes the pipe."""
    timeout = timedelta(seconds=_TIMEOUT_S)
    answer(Connection(fd), lambda: RawRank(TCPStore(LOOPBACK, port, None, False, timeout, False), 1))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # the group's own threads would have a say in the end
