"""What moves tensors between the trainer ranks of one session."""

from collections.abc import Sequence
from typing import Protocol

import torch

from wsync.deadline import Deadline

LOOK_S = 0.5
"""While others are waited for: how often this rank asks whether one of them has failed."""

Messages = Sequence[tuple[int, torch.Tensor]]
"""(peer rank, contiguous tensor)."""


class Transfers(Protocol):
    """One rank's. Whatever a call raises, they are of no use afterwards, but to be closed."""

    def run(self, sends: Messages, receives: Messages, deadline: Deadline) -> None:
        """Point to point in one batch; empty tensors stay. Work that is queued later on their device comes after it.

        The first one connects all ranks: each of them must make it, if only with nothing to say.

        Raises:
            RankError: a rank died, or has failed by itself and will not take part.
            TransportError: a peer closed the connection, or the library failed.
            SyncTimeout: not done before `deadline`.
        """
        ...

    def settle(self, deadline: Deadline) -> None:
        """Wait until what was run is done, on the device too. Raises as `run`."""
        ...

    def close(self) -> None:
        """Leave. What still runs on a device is ended."""
        ...
