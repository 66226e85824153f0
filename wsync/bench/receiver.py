"""A bare engine: parameters of any name and shape, and the library's own worker. It generates nothing."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from wsync.config import PauseMode
from wsync.deadline import Deadline
from wsync.engine import WorkerEngine
from wsync.errors import MismatchError
from wsync.testing.samples import bytes_of, digests_of
from wsync.topology import Endpoint, local_endpoint
from wsync.worker import Worker


class BareLoader:
    """Meets `wsync.Loader`: every source is copied to the parameter of its own name."""

    engine = "bare receiver"
    whole = True

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def endpoint(self) -> Endpoint:
        """This process, where the tensors are."""
        return local_endpoint(next(iter(self._tensors.values())).device)

    def targets(self) -> Mapping[str, torch.Tensor]:
        """All tensors."""
        return self._tensors

    def required(self) -> Sequence[str]:
        """All tensors."""
        return list(self._tensors)

    def accepts(self, name: str) -> bool:
        """Nothing but what is required."""
        return False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each to its place. Raises `MismatchError` for an unknown name."""
        for name, weight in weights:
            if name not in self._tensors:
                raise MismatchError(f"{name}: this receiver has no such tensor")
            self._tensors[name].copy_(weight)

    def launch_weights(self) -> None:
        """None: it started with random numbers."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def finish(self) -> None:
        """Nothing to process."""

    def rollback(self) -> None:
        """Nothing to undo."""


class BareEngine(WorkerEngine):
    """One worker with `tensors`, in this process."""

    name = "bare"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.tensors = tensors
        self.loader = BareLoader(tensors)
        self._worker = Worker(self.loader)

    def spoil(self) -> None:
        """Make every byte wrong, so that only a sync can put it right."""
        for tensor in self.tensors.values():
            memory = bytes_of(tensor)
            torch.bitwise_not(memory, out=memory)

    def digests(self) -> dict[str, str]:
        """Name -> digest of the bytes that are there now."""
        return digests_of(self.tensors)

    # See WorkerEngine.

    def call(self, method: str, payload: bytes, timeout_s: float | None) -> Sequence[bytes]:
        """Ask the only worker."""
        return [self._worker.handle(method, payload)]

    def guard(self, reason: str | None) -> None:
        """Nothing is served."""

    def on_pause(self, mode: PauseMode, deadline: Deadline) -> None:
        """Nothing runs."""

    def on_resume(self, deadline: Deadline) -> None:
        """Nothing runs."""

    def on_reset_cache(self, deadline: Deadline) -> None:
        """Nothing is cached."""

    def on_sleep(self, level: int, deadline: Deadline) -> None:
        """Nothing is released."""

    def on_wake_up(self, tags: Sequence[str], deadline: Deadline) -> None:
        """Nothing was released."""
