"""As in `vllm_plain`, and experts stay plain too: vLLM's CPU build packs them, and what is packed cannot be pulled.

They are packed anew in every forward instead, by vLLM itself, so that it computes what it always does.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

import tests.engines.vllm_plain  # noqa: F401 - importing it is the switch for linear weights
from tests.engines.vllm_extension import LookingExtension

_pack, _apply = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply


def _apply_plain(experts: Any, *, w1: torch.Tensor, w2: torch.Tensor, **others: Any) -> None:
    packed = torch.nn.Module()
    packed.w13_weight = torch.nn.Parameter(w1.detach(), requires_grad=False)
    packed.w2_weight = torch.nn.Parameter(w2.detach(), requires_grad=False)
    _pack(experts, packed)
    _apply(experts, w1=packed.w13_weight, w2=packed.w2_weight, **others)


CPUUnquantizedExperts.process_weights_after_loading = lambda experts, layer: None
CPUUnquantizedExperts.apply = _apply_plain


class ExpertsExtension(LookingExtension):
    """In a module of its own, so that it acts in each worker process that vLLM starts with it."""
