"""As in `vllm_experts`, and vLLM's loader computes with the experts that it is given, so that no copy expresses it."""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

import tests.engines.vllm_experts  # noqa: F401 - importing it is the switch
from tests.engines.vllm_extension import LookingExtension

_load = RoutedExperts.weight_loader


def _load_computed(layer: Any, param: Any, loaded_weight: torch.Tensor, *others: Any, **more: Any) -> Any:
    return _load(layer, param, loaded_weight.neg().neg(), *others, **more)


RoutedExperts.weight_loader = _load_computed


class ComputedExtension(LookingExtension):
    """In a module of its own, so that it acts in each worker process that vLLM starts with it."""
