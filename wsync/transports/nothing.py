"""Both ends of a way on which nothing travels: that of a plan of which everything is pulled."""

import secrets
from collections.abc import Iterator, Sequence

import torch

from wsync.deadline import Deadline
from wsync.errors import ProtocolError
from wsync.plan import Bucket, Plan
from wsync.protocols import Ticket

NAME = "pull"
"""What a report calls it, in the place of a transport."""


class NoSender:
    """Meets `wsync.Sender`. Its ticket tells workers apart that are attached by different sessions."""

    by_reference = False
    held_bytes = 0

    def __init__(self, generation: int) -> None:
        """Open nothing. `generation` is for the ticket."""
        address, secret = secrets.token_hex(16), secrets.token_bytes(32)
        self._ticket = Ticket(transport=NAME, address=address, secret=secret, generation=generation)

    def ticket(self) -> Ticket:
        """See `wsync.Sender`."""
        return self._ticket

    def accept(self, deadline: Deadline) -> None:
        """Nobody connects."""

    def acquire(self, deadline: Deadline) -> torch.Tensor:
        """Raises `ProtocolError`: there is nothing to send."""
        raise ProtocolError("everything in this plan is pulled: there is no slot")

    def commit(self, bucket: Bucket) -> None:
        """Raises `ProtocolError`."""
        raise ProtocolError(f"everything in this plan is pulled: bucket {bucket.index} cannot be sent")

    def hand_over(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> None:
        """Raises `ProtocolError`."""
        self.commit(bucket)

    def drain(self, deadline: Deadline) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is open."""


class NoReceiver:
    """Meets `wsync.Receiver`."""

    def buckets(self, plan: Plan, deadline: Deadline) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        """None. Raises `ProtocolError` for a plan that has any."""
        if plan.buckets:
            raise ProtocolError(f"{len(plan.buckets)} buckets are expected where nothing travels")
        return iter(())

    def fail(self, message: str) -> None:
        """Nobody listens: the trainer hears it from the engine."""

    def close(self) -> None:
        """Nothing is open."""
