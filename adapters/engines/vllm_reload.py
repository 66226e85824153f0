"""vLLM's layerwise reload, made safe to rehearse, to fail and to repeat.

Where vLLM repacked the weights after loading them (its CPU build gives linear weights to oneDNN and keeps an empty
parameter), nothing can be written in place. Its layerwise reload restores the checkpoint's layout on the meta device,
keeps what arrives until a layer is complete, and then repacks the layer into its old memory.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch


def repacked(model: torch.nn.Module) -> list[str]:
    """Parameters that no longer have the layout in which vLLM's loader writes them. Empty: load in place."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    names = []
    for path, layer in model.named_modules():
        info = LAYERWISE_INFO.get(layer)
        if info is None:
            continue
        recorded, live = info.restore_metadata[0], _parameters(layer)
        changed = [name for name, meta in recorded.items() if name not in live or not _same(meta, live[name])]
        added = [name for name in live if name not in recorded and name not in SKIP_TENSORS]
        names += [_join(path, name) for name in (*changed, *added)]
    return names


class StandIns:
    """Tensors with the checkpoint's layout, to rehearse on where the live ones were repacked.

    Their memory is reserved and never touched, so that it costs address space only.

    Attributes:
        targets: every parameter and buffer by name, stand-ins where the loader would find other ones in a reload.
        required: names in `targets` that are parameters.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.targets: dict[str, torch.Tensor] = {}
        self.required: list[str] = []
        self._memory: dict[str, torch.Tensor] = {}
        shared: dict[int, torch.Tensor] = {}
        for path, layer in model.named_modules():
            parameters, buffers, kept = _checkpoint_layout(layer)
            for name, meta in {**parameters, **buffers}.items():
                full = _join(path, name)
                live = layer._parameters.get(name)
                tied = shared.get(id(live)) if live is not None else None
                self._memory[full] = memory = _reserve(meta) if tied is None else tied
                if live is not None:
                    shared[id(live)] = memory
                if tied is None:
                    self._add(full, memory, name in parameters)
            for name, tensor in kept.items():
                self._add(_join(path, name), tensor.detach(), name in layer._parameters)

    def _add(self, name: str, tensor: torch.Tensor, is_parameter: bool) -> None:
        self.targets[name] = tensor
        if is_parameter:
            self.required.append(name)

    @contextmanager
    def placed(self, model: torch.nn.Module) -> Iterator[None]:
        """Context in which `model` has the stand-ins, with vLLM's own weight loaders on them."""
        saved: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = []
        try:
            for path, layer in model.named_modules():
                saved.append((layer, dict(layer._parameters), dict(layer._buffers)))
                self._place(path, layer)
            yield
        finally:
            for layer, old_parameters, old_buffers in saved:
                _replace(layer._parameters, old_parameters)
                _replace(layer._buffers, old_buffers)

    def _place(self, path: str, layer: torch.nn.Module) -> None:
        parameters, buffers, kept = _checkpoint_layout(layer)
        for entries, recorded in ((layer._parameters, parameters), (layer._buffers, buffers)):
            twins = {name: _dress(self._memory[_join(path, name)], meta, layer) for name, meta in recorded.items()}
            stay = {name: tensor for name, tensor in entries.items() if tensor is None or name in kept}
            _replace(entries, {**stay, **twins})


def begin(model: torch.nn.Module) -> None:
    """Restore the checkpoint's layout and wait for every tensor of the model."""
    from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

    for layer in _experts(model):
        if all(tensor.device.type != "cpu" for tensor in _parameters(layer).values()):
            continue
        layer.quant_method.process_weights_after_loading = partial(_process_experts, layer.quant_method)
    initialize_layerwise_reload(model)


def finish(model: torch.nn.Module, model_config: Any) -> None:
    """Repack what is still to be repacked, attention last."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    for layer in _tied_layers(model):
        # vLLM repacks a tied weight for the layer under whose name it came, and forgets the other one's packed copy.
        layer.quant_method.process_weights_after_loading(layer)
    _release_experts(model)


def rollback(model: torch.nn.Module) -> None:
    """End a reload that failed. Layers that were complete hold new weights, the others their old ones.

    Without this the next reload would count what is left of the failed one as its own.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    for layer in model.modules():
        info = layerwise.LAYERWISE_INFO.get(layer)
        if info is None or not info.can_load():
            continue
        if info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            for tensor in (*_parameters(layer).values(), *_buffers(layer).values()):
                _unwrap(tensor)
        info.reset()
    layerwise.LOADING_LAYERS.clear()
    _release_experts(model)


def _checkpoint_layout(
    layer: torch.nn.Module,
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """(parameters, buffers) that a reload restores, on meta, and the live tensors that it leaves as they are."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    live = {**_parameters(layer), **_buffers(layer)}
    info = LAYERWISE_INFO.get(layer)
    if info is None:
        return {}, {}, live
    parameters, buffers = (
        {name: meta for name, meta in recorded.items() if name not in SKIP_TENSORS}
        for recorded in info.restore_metadata
    )
    return parameters, buffers, {name: tensor for name, tensor in live.items() if name in SKIP_TENSORS}


def _reserve(meta: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="cpu")


def _dress(memory: torch.Tensor, meta: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """`memory` as the parameter that `meta` describes: its class, and the weight loader that vLLM hung on it."""
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    twin: Any = memory.detach()
    twin.__class__ = meta.__class__
    twin.__dict__ = meta.__dict__.copy()
    twin = restore_layer_refs(twin, layer)
    _unwrap(twin)  # what was recorded keeps the wrapper of the last reload
    return cast(torch.Tensor, twin)


def _unwrap(tensor: Any) -> None:
    """Give a parameter its own weight loader back, if a reload put one of its own in front."""
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader

    loader = getattr(tensor, "weight_loader", None)
    if loader is not None and (original := _get_original_loader(tensor)) is not loader:
        tensor.weight_loader = original


def _tied_layers(model: torch.nn.Module) -> Iterator[Any]:
    """Layers with unquantised weights that share a parameter with another layer."""
    owners: dict[int, list[Any]] = defaultdict(list)
    for layer in model.modules():
        for parameter in _parameters(layer).values():
            owners[id(parameter)].append(layer)
    for layers in owners.values():
        for layer in layers if len(layers) > 1 else ():
            if type(getattr(layer, "quant_method", None)).__name__.startswith("Unquantized"):
                yield layer


def _experts(model: torch.nn.Module) -> Iterator[Any]:
    """Layers of unquantised experts."""
    for layer in model.modules():
        if type(getattr(layer, "quant_method", None)).__name__ == "UnquantizedFusedMoEMethod":
            yield layer


def _process_experts(method: Any, layer: Any) -> None:
    """Also pad and pack experts for vLLM's CPU build, which does that at launch only.

    In the middle of a reload, before it copies the result to where the experts lie: padded ones are larger.
    """
    type(method).process_weights_after_loading(method, layer)
    method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def _release_experts(model: torch.nn.Module) -> None:
    """Undo what `begin` did to experts."""
    for layer in _experts(model):
        vars(layer.quant_method).pop("process_weights_after_loading", None)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _parameters(layer: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: tensor for name, tensor in layer._parameters.items() if tensor is not None}


def _buffers(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in layer._buffers.items() if tensor is not None}


def _replace(entries: dict[str, Any], new: Mapping[str, Any]) -> None:
    entries.clear()
    entries.update(new)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
