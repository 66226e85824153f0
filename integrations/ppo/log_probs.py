"""Log-probabilities and values of tokens, by models as transformers has them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from integrations.ppo.fused_head import fused_head, token_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How a forward is made."""

    temperature: float
    """That tokens were sampled with."""

    packing: bool = False
    """All sequences in one row, without padding; attention does not reach from one to another."""

    chunk_size: int | None = None
    """Logits of so many tokens at a time, never kept; None: of all at once."""


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
    labels = sequences.roll(-1, 1)
    labels = _packed(labels, attention_mask) if scoring.packing else labels
    inputs = _inputs(sequences, attention_mask, packing=scoring.packing)
    if scoring.chunk_size is None:
        numbers = token_numbers(model(**inputs).logits, labels, scoring.temperature, entropy=entropy)
    else:
        with fused_head(model, labels, scoring.temperature, scoring.chunk_size, entropy=entropy):
            numbers = model(**inputs).logits
    numbers = _unpacked(numbers, attention_mask) if scoring.packing else numbers
    return numbers[:, :-1, 0], numbers[:, :-1, 1] if entropy else None


def token_values(
    critic: Callable[..., Any], sequences: torch.Tensor, attention_mask: torch.Tensor, *, packing: bool = False
) -> torch.Tensor:
    """The critic's value before each token but the first, float32 `[batch, length - 1]`.

    `critic` is a token classifier with one label: it gives `.logits` `[batch, length, 1]`.
    """
    logits = critic(**_inputs(sequences, attention_mask, packing=packing)).logits.float()
    logits = _unpacked(logits, attention_mask) if packing else logits
    values: torch.Tensor = logits[:, :-1, 0]
    return values


def _inputs(sequences: torch.Tensor, attention_mask: torch.Tensor, *, packing: bool) -> dict[str, Any]:
    """transformers takes positions that begin anew, without a mask, for packed sequences."""
    if not packing:
        return {"input_ids": sequences, "attention_mask": attention_mask, "use_cache": False}
    positions = torch.arange(sequences.shape[1], device=sequences.device).expand_as(sequences)
    return {
        "input_ids": _packed(sequences, attention_mask),
        "position_ids": _packed(positions, attention_mask),
        "use_cache": False,
    }


def _packed(tensor: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """`[batch, length]` -> `[1, tokens]`."""
    return tensor[attention_mask][None]


def _unpacked(tensor: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """`[1, tokens, n]` -> `[batch, length, n]`, 0 where padding is."""
    whole = tensor.new_zeros(*attention_mask.shape, tensor.shape[-1])
    return whole.masked_scatter(attention_mask[..., None], tensor)
