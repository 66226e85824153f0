"""Several senders that take turns, as one receiver."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from wsync.deadline import Deadline
from wsync.errors import PeerError
from wsync.plan import Bucket, Plan
from wsync.protocols import Receiver

Arrival = tuple[Bucket, Sequence[torch.Tensor]]


class SteppingReceiver(Receiver, Protocol):
    """A receiver that releases a bucket without waiting for its next one."""

    def steps(self, plan: Plan, deadline: Deadline) -> Iterator[Arrival | None]:
        """As `buckets`, but each is followed by None: advancing to it is the release, and does not wait."""
        ...


class TurnsReceiver:
    """Meets `wsync.Receiver`: buckets in the order of the plan, each from the receiver of its sender.

    Asking for the next bucket releases the last one, though that is another sender's.
    """

    def __init__(self, receivers: Sequence[SteppingReceiver]) -> None:
        """Takes over one receiver for each of the plan's `turns`, in their order."""
        self._receivers = tuple(receivers)

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[Arrival]:
        """See `wsync.Receiver`."""
        arriving = {
            rank: receiver.steps(plan.sent_by(rank), deadline)
            for rank, receiver in zip(plan.turns, self._receivers, strict=True)
        }
        for bucket in plan.buckets:
            assert bucket.sender is not None
            with _naming(bucket.sender):
                arrival = next(arriving[bucket.sender])
            assert arrival is not None
            yield arrival
            del arrival  # its views must be gone
            with _naming(bucket.sender):
                next(arriving[bucket.sender])
        for rank, rest in arriving.items():
            with _naming(rank):
                next(rest, None)  # waits until what was read was sure to be the sender's

    def fail(self, message: str) -> None:
        """See `wsync.Receiver`."""
        for receiver in self._receivers:
            receiver.fail(message)  # never raises

    def close(self) -> None:
        """See `wsync.Receiver`."""
        for receiver in self._receivers:
            receiver.close()


@contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Whoever hears of a sender that is gone, perhaps from another one, hears which it was."""
    try:
        yield
    except PeerError as error:
        raise PeerError(f"sender of trainer rank {rank}: {error.args[0]}", error.remote_traceback) from error
