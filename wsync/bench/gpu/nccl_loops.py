"""How trainers move weights to an engine on another GPU today, over NCCL.

Written from what trainers do, not from their code, and as cheap as it can be: calls go through a pipe, where trainers
use HTTP or Ray, and nothing is checked.

    nccl packed     vLLM's own weight transfer: buffers of a GiB on two streams, its layerwise reload
    push each       a call and a broadcast for each tensor, in a communicator of vLLM's, its loader (TRL with a server)
"""

from typing import Any

import torch
from torch import nn

from wsync.bench.gpu.far import LOOPBACK, Far, free_port
from wsync.bench.gpu.models import engine_side


class Packed:
    """vLLM's own, both halves of it."""

    def __init__(self, far: Far) -> None:
        """Meet the engine."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self._far, self._transfer = far, NCCLWeightTransferEngine
        port = free_port()
        far.tell("packed_join", port)
        info = {"master_address": LOOPBACK, "master_port": port, "world_size": 2}
        self._group = NCCLWeightTransferEngine.trainer_init(info)
        far.hear()

    def send(self, actor: nn.Module) -> None:
        """All weights of `actor`."""
        weights = list(engine_side(actor))
        names, dtypes = [name for name, _ in weights], [_dtype(tensor) for _, tensor in weights]
        self._far.tell("packed_receive", names, dtypes, [list(tensor.shape) for _, tensor in weights])
        self._transfer.trainer_send_weights(iter(weights), {"group": self._group, "packed": True})
        torch.cuda.synchronize()
        self._far.hear()


class Each:
    """One tensor after the other."""

    def __init__(self, far: Far) -> None:
        """Meet the engine."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        self._far = far
        port = free_port()
        far.tell("each_join", port)
        group = StatelessProcessGroup.create(host=LOOPBACK, port=port, rank=0, world_size=2)
        self._group: Any = PyNcclCommunicator(group, device=torch.cuda.current_device())
        far.hear()

    def send(self, actor: nn.Module) -> None:
        """All weights of `actor`."""
        far, loading = self._far, False
        for name, tensor in engine_side(actor):
            far.tell("each_receive", name, _dtype(tensor), list(tensor.shape))
            far.tell("each_load")
            self._group.broadcast(tensor, src=0)
            if loading:
                far.hear()
            far.hear()  # it has the broadcast in its stream, and loads while this side goes on
            loading = True
        far.hear()
        far.ask("synchronize")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
