"""Estimates of activations. Shapes alone do not tell: kernels, fusion and the loss decide. Measure where it is tight.

A layer that trains keeps for its backward pass, in elements a token,

    4 hidden        input and output of both norms
    2 q + 2 kv      queries, keys, values, and what attention puts out, by an attention that keeps no scores
    4 inter         gate, up, the activated gate and the product; of a mixture, for each expert that a token takes

and the end of the model vocab times (compute dtype + 8) bytes a token: logits, their float32 copy, its gradient. With
checkpointing every layer keeps `hidden` elements a token, and one layer at a time has the rest.
"""

from wsync.planner.model import Width
from wsync.planner.setting import Setting

ENGINE_TOKENS = 8192
"""Most tokens of one step of vLLM's, its `max_num_batched_tokens` on large GPUs."""

ENGINE_REQUESTS = 1024
"""Most requests of one step, of which each has its logits; vLLM's `max_num_seqs` on large GPUs."""

_LOGIT_BYTES = 8
"""Of what is float32 for each logit: a copy and its gradient, or what sampling sorts."""


def training_activations(setting: Setting) -> int:
    """Bytes at the start of a backward pass on one rank."""
    if setting.activations is not None:
        return setting.activations
    widths = [_kept(width) for width in setting.model.widths]
    itemsize = setting.compute_dtype.itemsize
    elements = len(widths) * setting.model.hidden + max(widths) if setting.checkpointing else sum(widths)
    a_token = elements * itemsize + setting.model.vocab * (itemsize + _LOGIT_BYTES)
    return setting.micro_batch * setting.sequence * a_token


def engine_activations(setting: Setting) -> int:
    """Bytes of the largest step of one worker: one layer for all tokens, whole on each worker, and logits."""
    if setting.engine_activations is not None:
        return setting.engine_activations
    itemsize = setting.engine_dtype.itemsize
    layer = ENGINE_TOKENS * max(map(_kept, setting.model.widths)) * itemsize
    return layer + ENGINE_REQUESTS * setting.model.vocab * (itemsize + _LOGIT_BYTES)


def _kept(width: Width) -> int:
    return 4 * width.hidden + 2 * width.q + 2 * width.kv + 4 * width.inter
