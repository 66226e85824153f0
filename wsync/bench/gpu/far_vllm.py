"""Program: vLLM on the one GPU that this process sees, served for wsync, and the receiving half of rivals over NCCL.

    python -m wsync.bench.gpu.far_vllm FD FOLDER TRANSFER

TRANSFER is vLLM's own backend for weights, or nothing.
"""

import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import wsync
from wsync.bench.gpu import engines
from wsync.bench.gpu.checks import free
from wsync.bench.gpu.far import LOOPBACK
from wsync.bench.gpu.far_end import answer
from wsync.bench.gpu.loops import LoopExtension

_EXTENSION = "wsync.bench.gpu.far_vllm.Extension"


class Extension(LoopExtension):
    """wsync's extension, and the worker's half of a push of single tensors."""

    def each_join(self, port: int) -> None:
        """Meet the trainer, which is rank 0."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        this: Any = self  # vLLM makes this class a base of its worker
        group = StatelessProcessGroup.create(host=LOOPBACK, port=port, rank=1, world_size=2)
        this.each_group = PyNcclCommunicator(group, device=this.device)

    def each_receive(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Queue the broadcast of one tensor."""
        this: Any = self
        this.each_arrived = (name, torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=this.device))
        this.each_group.broadcast(this.each_arrived[1], src=0)

    def each_load(self) -> None:
        """Load it behind the broadcast."""
        this: Any = self
        this.model_runner.model.load_weights([this.each_arrived])


class FarVLLM:
    """The methods that `Far` calls."""

    def __init__(self, folder: Path, transfer: str) -> None:
        self._llm = engines.start_vllm(folder, "bfloat16", extension=_EXTENSION, transfer=transfer)
        self._served = wsync.serve(self._llm)

    def reach(self) -> tuple[str, bytes]:
        """Address and secret for `wsync.RemoteEngine`."""
        return self._served.address, self._served.secret

    def answers(self) -> list[list[int]]:
        """Greedy tokens."""
        with self._served.using():
            return engines.answers_of(self._llm)

    def reports(self) -> list[bytes]:
        """What the workers say of themselves."""
        with self._served.using():
            found: list[bytes] = self._llm.collective_rpc("loop_report")
        return found

    def free_bytes(self) -> int:
        """Of the device, when nothing is cached."""
        free()
        return torch.cuda.mem_get_info()[0]

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def packed_join(self, port: int) -> None:
        """vLLM's own transfer: meet the trainer, which is rank 0."""
        info = {"master_address": LOOPBACK, "master_port": port, "rank_offset": 1, "world_size": 2}
        self._llm.init_weight_transfer_engine({"init_info": info})

    def packed_receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        """vLLM's own transfer, its own buffers and its layerwise reload."""
        info = {"names": list(names), "dtype_names": list(dtypes), "shapes": [list(shape) for shape in shapes]}
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {**info, "packed": True}})
        self._llm.finish_weight_update()

    def each_join(self, port: int) -> None:
        """A push of single tensors: meet the trainer, which is rank 0."""
        self._llm.collective_rpc("each_join", args=(port,))

    def each_receive(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Queue the broadcast of one tensor."""
        self._llm.collective_rpc("each_receive", args=(name, dtype, shape))

    def each_load(self) -> None:
        """Load it."""
        self._llm.collective_rpc("each_load")


def main(fd: int, folder: Path, transfer: str) -> None:
    """Answer until the other side closes the pipe."""
    answer(Connection(fd), lambda: FarVLLM(folder, transfer))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    sys.stdout.flush()
    os._exit(0)  # an engine's threads would keep the process
