"""Log-probabilities and values of tokens, by models as transformers has them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from integrations.ppo.fused_head import fused_head, token_numbers
from integrations.ppo.layouts import Layout, Packed, Padded, Sliced
from integrations.ppo.sequence_parallel import SequenceParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How a forward is made."""

    temperature: float
    """That tokens were sampled with."""

    packing: bool = False
    """All sequences in one row, without padding; attention does not reach from one to another."""

    chunk_size: int | None = None
    """Logits of so many tokens at a time, never kept; None: of all at once."""

    sequence_parallel: SequenceParallel | None = None
    """The ranks among which every sequence is cut; their calls are collective then."""


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Have a module in evaluation mode for a block, then in the mode that it was in."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def token_log_probs(
    model: Any, sequences: torch.Tensor, attention_mask: torch.Tensor, scoring: Scoring, *, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of each token but the first after those before it: (log-probabilities, entropies in nats or None).

    Args:
        model: gives `.logits` `[batch, length, vocabulary]`.
        sequences: int64 `[batch, length]`, padded on the right.
        attention_mask: bool `[batch, length]`.
        scoring: how.
        entropy: whether entropies are wanted.

    Both results are float32 `[batch, length - 1]`; what stands where padding is means nothing.
    """
    layout = _layout(sequences, attention_mask, scoring)
    labels = layout.take(sequences.roll(-1, 1))
    if scoring.chunk_size is None:
        numbers = token_numbers(model(**layout.inputs()).logits, labels, scoring.temperature, entropy=entropy)
    else:
        with fused_head(model, labels, scoring.temperature, scoring.chunk_size, entropy=entropy):
            numbers = model(**layout.inputs()).logits
    numbers = layout.put(numbers)
    return numbers[:, :-1, 0], numbers[:, :-1, 1] if entropy else None


def token_values(
    critic: Callable[..., Any], sequences: torch.Tensor, attention_mask: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """The critic's value before each token but the first, float32 `[batch, length - 1]`.

    `critic` is a token classifier with one label: it gives `.logits` `[batch, length, 1]`.
    """
    layout = _layout(sequences, attention_mask, scoring)
    return layout.put(critic(**layout.inputs()).logits.float())[:, :-1, 0]


def _layout(sequences: torch.Tensor, attention_mask: torch.Tensor, scoring: Scoring) -> Layout:
    if scoring.sequence_parallel is not None:
        return Sliced(sequences, scoring.sequence_parallel)
    return (Packed if scoring.packing else Padded)(sequences, attention_mask)
