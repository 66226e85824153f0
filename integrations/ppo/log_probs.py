"""Log-probabilities of tokens, by a causal model as transformers has them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
    model: Callable[..., Any], sequences: torch.Tensor, attention_mask: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token but the first after those before it: (log-probabilities, logits / temperature).

    Args:
        model: gives `.logits` `[batch, length, vocabulary]`.
        sequences: int64 `[batch, length]`, padded on the right.
        attention_mask: bool `[batch, length]`.
        temperature: that tokens were sampled with.

    Returns float32 `[batch, length - 1]` and `[batch, length - 1, vocabulary]`.
    """
    logits = model(input_ids=sequences, attention_mask=attention_mask, use_cache=False).logits
    logits = logits[:, :-1].float() / temperature
    chosen = logits.gather(-1, sequences[:, 1:, None])[..., 0]
    return chosen - logits.logsumexp(-1), logits


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Of each distribution, in nats: `[..., vocabulary]` -> `[...]`."""
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def token_values(critic: Callable[..., Any], sequences: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The critic's value before each token but the first, float32 `[batch, length - 1]`.

    `critic` is a token classifier with one label: it gives `.logits` `[batch, length, 1]`.
    """
    logits = critic(input_ids=sequences, attention_mask=attention_mask, use_cache=False).logits
    values: torch.Tensor = logits[:, :-1, 0].float()
    return values
