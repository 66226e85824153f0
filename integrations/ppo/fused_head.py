"""The output layer and the log-probabilities in one, chunk by chunk: logits of all tokens are never there at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from integrations.ppo.errors import ConflictError

AFTER_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Entries of a configuration by which a model changes its logits after the output layer."""


def token_numbers(logits: torch.Tensor, labels: torch.Tensor, temperature: float, *, entropy: bool) -> torch.Tensor:
    """Of each token its log-probability and, if wanted, the entropy of its distribution.

    `[..., vocabulary]` and int64 `[...]` -> float32 `[..., 1 or 2]`.
    """
    logits = logits.float() / temperature
    total = logits.logsumexp(-1)
    log_probs = logits.gather(-1, labels[..., None])[..., 0] - total
    if not entropy:
        return log_probs[..., None]
    return torch.stack([log_probs, total - (logits.softmax(-1) * logits).sum(-1)], -1)


@contextmanager
def fused_head(
    model: Any, labels: torch.Tensor, temperature: float, chunk_size: int, *, entropy: bool
) -> Iterator[None]:
    """Let `model(...).logits` be `token_numbers` of `labels` within a block.

    The output layer stays a module that is called in the model's forward, so that whoever shards it gathers it then.

    Raises:
        ConflictError: the model changes its logits after that layer.
    """
    head = model.get_output_embeddings()
    if after := [name for name in AFTER_HEAD if getattr(model.config, name, None) not in (None, 1, 1.0)]:
        raise ConflictError(
            f"--fused_linear_logprob: this model changes its logits after the output layer ({after[0]})"
        )
    plain = head.forward

    def chunk(hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return token_numbers(plain(hidden), wanted, temperature, entropy=entropy)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        tokens, wanted = torch.split(hidden.flatten(0, 1), chunk_size), torch.split(labels.flatten(), chunk_size)
        numbers = [checkpoint(chunk, *part, use_reentrant=False) for part in zip(tokens, wanted, strict=True)]
        return torch.cat(numbers).reshape(*labels.shape, -1)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
