"""Prompts: where they come from, and how far a run has read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from integrations.ppo import toy
from integrations.ppo.errors import ConflictError

TOY_PROMPTS = 4096
TOY_EVAL_PROMPTS = 63
"""Odd: ranks evaluate different numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One line of the data."""

    text: str
    label: str | None = None


class PromptDataset(Dataset[Prompt]):
    """All prompts of a run."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


def from_jsonl(path: str, input_key: str, label_key: str) -> PromptDataset:
    """One prompt a line; a label that is no text is its JSON. Raises `ConflictError` if one, or all, has no prompt."""
    from datasets import load_dataset

    with open(path) as file:
        if not any(line.strip() for line in file):
            raise ConflictError(f"{path} has no lines; one prompt a line is wanted")
    rows = load_dataset("json", data_files=path, split="train")
    found = []
    for number, row in enumerate(rows, 1):
        text, label = row.get(input_key), row.get(label_key)
        if not isinstance(text, str) or not text:
            raise ConflictError(f"{path}, line {number}: no text under {input_key!r}; it has {', '.join(row)}")
        found.append(Prompt(text=text, label=_text(label)))
    return PromptDataset(found)


def _text(label: object) -> str | None:
    return label if label is None or isinstance(label, str) else json.dumps(label)


def from_toy(number: int, seed: int) -> PromptDataset:
    """Prompts of the toy task."""
    return PromptDataset([Prompt(text=text) for text in toy.prompts(number, seed)])


class PromptStream:
    """Batches of one rank without end, epoch after epoch; knows where it is."""

    def __init__(self, loader: "DataLoader[Prompt]") -> None:
        """`loader` has a `DistributedSampler`. Raises `ConflictError` if an epoch has no batch."""
        if not len(loader):
            raise ConflictError("there are fewer prompts than one iteration takes: --rollout_batch_size")
        self._loader = loader
        self._epoch = self._taken = 0
        self._batches = self._open()

    def __next__(self) -> list[Prompt]:
        if self._taken == len(self._loader):
            self._epoch, self._taken = self._epoch + 1, 0
            self._batches = self._open()
        self._taken += 1
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"epoch": self._epoch, "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._epoch, self._taken = state["epoch"], state["taken"]
        self._batches = self._open()

    def _open(self) -> Iterator[list[Prompt]]:
        sampler = self._loader.sampler
        assert isinstance(sampler, DistributedSampler)
        sampler.set_epoch(self._epoch)
        batches: Iterator[list[Prompt]] = iter(self._loader)
        return islice(batches, self._taken, None)
