"""Several senders that take turns, as one receiver."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from wsync.deadline import Deadline
from wsync.errors import PeerError
from wsync.plan import Bucket, Plan
from wsync.protocols import Receiver


class TurnsReceiver:
    """Meets `wsync.Receiver`: buckets in the order of the plan, each from the receiver of its sender.

    A sender's slot is released when its next turn comes, so that each of them sends ahead as far as it has slots. The
    last slots are released together.
    """

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        """Takes over one receiver for each of the plan's `turns`, in their order."""
        self._receivers = tuple(receivers)

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        """See `wsync.Receiver`."""
        arriving = {
            rank: iter(receiver.buckets(plan.sent_by(rank), deadline))
            for rank, receiver in zip(plan.turns, self._receivers, strict=True)
        }
        for bucket in plan.buckets:
            assert bucket.sender is not None
            with _naming(bucket.sender):
                item = next(arriving[bucket.sender])
            yield item
            del item
        for rest in arriving.values():
            next(rest, None)  # releases the last one

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
