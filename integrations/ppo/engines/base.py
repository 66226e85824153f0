"""What the trainer needs of an engine that generates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample."""

    max_new_tokens: int
    temperature: float
    """0 is greedy."""

    seed: int
    """Of a rank's first prompt; the next one has the next seed."""

    stop_token_id: int | None
    """Ends an answer, and is a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    log_probs: list[float]
    """Of each token of the output, at the temperature of sampling; of greedy answers at temperature 1."""


class InferenceEngine(Protocol):
    """An engine on one rank, or this rank's part of one."""

    @property
    def handle(self) -> object:
        """What `wsync.sync` takes; None on a rank that owns no part."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        """One answer to each prompt, which depends on weights, prompts and seeds alone. Leaves torch's seeds alone.

        Called on every rank that has a `handle`.
        """
        ...

    def close(self) -> None:
        """End its processes, if it has any."""
        ...
