"""Sequences that wait to be trained on, in host memory."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from integrations.ppo.experience import Experience, collate


class ReplayBuffer:
    """One rank's sequences, one by one and without padding. They go to a device a micro-batch at a time."""

    def __init__(self) -> None:
        self._rows: list[Experience] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, experience: Experience) -> None:
        """Take every sequence of a batch."""
        self._rows += experience.rows()

    def clear(self) -> None:
        """Forget all."""
        self._rows = []

    def steps(self, seed: int, rows: int, micro_rows: int) -> Iterator[list[Experience]]:
        """All of it in an order that belongs to `seed`: `rows` for each optimizer step, cut into micro-batches.

        Raises `ValueError` if `rows` is no divisor of what is here, or `micro_rows` of `rows`.
        """
        if len(self) % rows or rows % micro_rows:
            raise ValueError(f"{len(self)} sequences do not go into steps of {rows} in micro-batches of {micro_rows}")
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).tolist()
        for start in range(0, len(order), rows):
            chosen = [self._rows[index] for index in order[start : start + rows]]
            yield [collate(chosen[first : first + micro_rows]) for first in range(0, rows, micro_rows)]

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain tensors."""
        return {"rows": [asdict(row) for row in self._rows]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The other way round."""
        self._rows = [Experience(**row) for row in state["rows"]]
