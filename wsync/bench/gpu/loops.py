"""How trainers move weights to an engine on the same GPU today, over CUDA IPC.

Written from what trainers do, not from their code, and as cheap as it can be: calls take the engine's own, where
trainers use Ray or HTTP, and nothing is checked.

    IPC each            a handle and a call for each tensor, loaded by vLLM's loader (OpenRLHF, colocated)
    IPC packed          tensors packed into a buffer of the size of a bucket, a handle and a call for each (verl)
    flattened_bucket    the same by SGLang's own update call (slime)
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

from wsync import wire
from wsync.adapters.engines.vllm_worker import WorkerExtension
from wsync.bench.gpu import workers
from wsync.bench.gpu.models import engine_side

EXTENSION = f"{__name__}.LoopExtension"

_ALIGNMENT_BYTES = 256

_reduce: Callable[..., Any] = reduce_tensor
_rebuild: Callable[..., Any] = rebuild_cuda_tensor


class LoopExtension(WorkerExtension):
    """wsync's own extension, the worker's half of the loops, and what `workers` asks."""

    def loop_load(self, payload: bytes) -> None:
        """Load tensors that lie in one exported tensor of bytes. `payload`: its handle, and what lies where."""
        this: Any = self  # vLLM makes this class a base of its worker
        message = cast("Mapping[str, Any]", wire.unpack(payload))
        handle = message["handle"]
        flat = _rebuild(
            torch.Tensor, (handle["nbytes"],), (1,), handle["offset"], TypedStorage, torch.uint8, *handle["of"]
        )
        weights = []
        for name, shape, dtype, start, nbytes in message["tensors"]:
            weights.append((name, flat[start : start + nbytes].view(getattr(torch, dtype)).view(shape)))
        this.model_runner.model.load_weights(weights)
        del weights, flat
        torch.cuda.synchronize()

    def loop_report(self) -> bytes:
        """See `workers.report`."""
        this: Any = self
        return workers.report(this.get_model())


def send_each(engine: Any, actor: nn.Module) -> None:
    """A call for each tensor."""
    for name, tensor in engine_side(actor):
        send_one(engine, name, tensor)


def send_one(engine: Any, name: str, tensor: torch.Tensor) -> None:
    """The call for one tensor."""
    _call(engine, tensor.reshape(-1).view(torch.uint8), [(name, tensor, 0)])


def send_packed(engine: Any, actor: nn.Module, bucket_bytes: int) -> None:
    """A call for each bucket; a tensor that is larger than a bucket has one of its own."""
    for bucket in _buckets(actor, bucket_bytes):
        places, end = [], 0
        for name, tensor in bucket:
            places.append((name, tensor, end))
            end += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        flat = torch.empty(end, dtype=torch.uint8, device="cuda")
        for _, tensor, start in places:
            flat[start : start + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
        torch.cuda.synchronize()
        _call(engine, flat, places)


def send_flattened(engine: Any, actor: nn.Module, bucket_bytes: int) -> None:
    """The same for SGLang, by its own call."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    for bucket in _buckets(actor, bucket_bytes):
        flat = FlattenedTensorBucket(named_tensors=bucket)
        data = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        engine.update_weights_from_tensor(
            named_tensors=[MultiprocessingSerializer.serialize(data)], load_format="flattened_bucket", flush_cache=False
        )


def _buckets(actor: nn.Module, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket, size = list[tuple[str, torch.Tensor]](), 0
    for name, tensor in engine_side(actor):
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket


def _call(engine: Any, flat: torch.Tensor, places: list[tuple[str, torch.Tensor, int]]) -> None:
    _, arguments = _reduce(flat)
    offset, shared = arguments[3], arguments[6:]
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), start, tensor.nbytes)
        for name, tensor, start in places
    ]
    handle = {"nbytes": flat.numel(), "offset": offset, "of": shared}
    engine.collective_rpc("loop_load", args=(wire.pack({"handle": handle, "tensors": tensors}),))
