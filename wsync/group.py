"""The trainer ranks of one session, talking among themselves and never on the trainer's own groups."""

from collections.abc import Sequence

import torch

from wsync.deadline import Deadline


class Group:
    """Host-side rounds over a key-value store, and a data communicator of wsync's own.

    Attributes:
        rank: this trainer rank.
        world_size: number of trainer ranks; 1 makes every method local.
    """

    rank: int
    world_size: int

    def round(self, phase: str, message: object, deadline: Deadline) -> list[object]:
        """Every rank's `message` (msgpack-able), by rank. Raises `RankError` naming ranks that did not come."""
        raise NotImplementedError

    def agree(self, phase: str, error: BaseException | None, deadline: Deadline) -> None:
        """Go/stop. Raises this rank's `error`, or `RankError` naming the ranks that reported one."""
        raise NotImplementedError

    def transfer(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        deadline: Deadline,
    ) -> None:
        """Point-to-point in one batch: (peer rank, contiguous tensor). Returns when all of it is done."""
        raise NotImplementedError

    def all_gather(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], deadline: Deadline) -> None:
        """Coalesced: `outputs[i]` `[world_size * n_i]` takes every rank's `inputs[i]` `[n_i]`, in rank order."""
        raise NotImplementedError
