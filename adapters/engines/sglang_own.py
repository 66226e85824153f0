"""The way into an SGLang engine that was started without wsync's worker half: SGLang's own update calls.

The worker then lives in the engine's process, knows the model by the checkpoint that it was started with, and sends
every tensor through SGLang's loader. Names and shapes are checked as strictly as always, because SGLang ignores an
unknown name in silence and ends itself over a wrong shape. What the weights became in the end cannot be seen from here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from wsync import wire
from wsync.adapters.engines.launch_files import headers, safetensors_files
from wsync.adapters.engines.sglang_calls import Updates
from wsync.errors import MismatchError
from wsync.topology import Endpoint, local_endpoint
from wsync.worker import Worker

_BUCKET_BYTES = 256 << 20
"""Most bytes of one update call, unless one tensor has more."""

_ALIGNMENT = 16


class OwnCallsWorker(Worker):
    """A worker that cannot show what is in the engine."""

    def handle(self, method: str, payload: bytes) -> bytes:
        """See `Worker.handle`."""
        if method == "read":
            message = "SGLang's own update calls are used, which cannot show weights; start it with wsync's plugin"
            return wire.pack({"error": {"type": "UnsupportedError", "message": message, "traceback": ""}})
        return super().handle(method, payload)


class OwnCallsLoader:
    """`wsync.protocols.Loader` over SGLang's update calls."""

    whole = True

    def __init__(self, engine: str, folder: Path, updates: Updates, patience_s: Callable[[], float]) -> None:
        """`folder` is the checkpoint that the engine called `engine` was started with; `patience_s` is for one call."""
        self.engine = engine
        self._updates, self._patience_s = updates, patience_s
        self._targets = {
            name: torch.empty(shape, dtype=dtype) for name, shape, dtype in headers(safetensors_files(folder))
        }
        self._attempt = False
        # Never read. It is written for each tensor, which tells the dry run that more happens to it than a copy.
        self._elsewhere = torch.empty((), dtype=torch.uint8)

    def endpoint(self) -> Endpoint:
        """This process: from here SGLang takes them further."""
        return local_endpoint("cpu")

    def targets(self) -> Mapping[str, torch.Tensor]:
        """The checkpoint's tensors, as memory that is reserved and never touched."""
        return self._targets

    def required(self) -> Sequence[str]:
        """Every tensor of the checkpoint."""
        return list(self._targets)

    def accepts(self, name: str) -> bool:
        """Whatever the checkpoint has."""
        return name in self._targets

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """In an attempt: send them. Else: say what would become of them."""
        if self._attempt:
            for batch in _batches(weights):
                self._updates.send(_flattened(batch), "flattened_bucket", self._patience_s())
            return
        for name, tensor in weights:
            self._elsewhere.zero_()
            target = self._targets.get(name)
            if target is None:
                raise MismatchError(f"{name} is not in the checkpoint that the engine was started with")
            if target.shape != tensor.shape:
                raise MismatchError(f"{name} has shape {list(tensor.shape)}, in the checkpoint {list(target.shape)}")
            target.copy_(tensor)

    def launch_weights(self) -> None:
        """None: nothing can be compared with them."""

    def begin(self) -> None:
        """Open SGLang's session."""
        self._updates.begin(self._patience_s())
        self._attempt = True

    def finish(self) -> None:
        """End it; SGLang derives what it derives."""
        self._attempt = False
        self._updates.end(self._patience_s())

    def rollback(self) -> None:
        """End it."""
        self._attempt = False
        self._updates.end(self._patience_s())


def _batches(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    batch: list[tuple[str, torch.Tensor]] = []
    nbytes = 0
    for name, tensor in weights:
        if batch and nbytes + tensor.nbytes > _BUCKET_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append((name, tensor))
        nbytes += tensor.nbytes
    if batch:
        yield batch


def _flattened(batch: Sequence[tuple[str, torch.Tensor]]) -> dict[str, object]:
    """SGLang's "flattened_bucket". SGLang's own helper leaves no room between tensors, so that some lie unaligned."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata, parts, end = [], [], 0
    for name, tensor in batch:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        padding = -end % _ALIGNMENT
        start, end = end + padding, end + padding + data.numel()
        parts += [data.new_zeros(padding), data]
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, data.numel()))
    return {"flattened_tensor": torch.cat(parts), "metadata": metadata}
