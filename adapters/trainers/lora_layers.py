"""What PEFT did to a module: the names of the model inside, and what LoRA adds to which of its weights.

Nothing is computed here. PEFT is not imported: a module that it has changed exists only where it is imported already.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from wsync.adapters.trainers.names import modules_by_prefix, unwrap
from wsync.errors import UnsupportedError, first_five

_MERGEABLE = ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ParamWrapper")


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """What one adapter adds to a tensor seen as a matrix: `scaling * b @ a`."""

    adapter: str

    b: str
    """Factor `[outputs, rank]`, by its name in the module; dims of size 1 after that do not count."""

    a: str | None
    """Factor `[rank, inputs]`; its dims after the first count as one. None: the bias of `b` itself, of rank 1."""

    transposed: bool
    """The tensor lies as `[inputs, outputs]`, so that the transpose is added."""

    scaling: float

    experts: int = 0
    """The tensor is a stack of that many such matrices; the factors hold theirs as PEFT's ParamWrapper has them."""

    magnitude: str | None = None
    """DoRA: the length, `[outputs]`, that the sum's vector of each output gets. None: plain LoRA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A module under LoRA, as the model that it would be once merged."""

    root: str
    """What the names of the tensors of the user's model begin with in the module."""

    names: Mapping[str, str]
    """Name in the module -> name in the model, of the tensors that the merged model has."""

    terms: Mapping[str, tuple[Term, ...]]
    """Name in the model -> what is added to that tensor. Others are exported as they are."""

    def factors(self) -> list[str]:
        """Names in the module of everything that `terms` speaks of."""
        found = [name for terms in self.terms.values() for term in terms for name in (term.b, term.a, term.magnitude)]
        return list(dict.fromkeys(name for name in found if name is not None))


def is_tuned(obj: object) -> bool:
    """Whether `obj` is a module with PEFT's layers in it, or a PEFT model of any kind."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(obj, nn.Module):
        return False
    if isinstance(unwrap(obj), (peft.PeftModel, peft.PeftMixedModel)):
        return True
    return any(_is(module, peft.tuners.tuners_utils.BaseTunerLayer) for module in obj.modules())


def examine(module: nn.Module, held: Sequence[str]) -> Tuned:
    """See `module`, which has tensors of the names `held`, as a merged model.

    Raises `UnsupportedError` naming the layer and what of it cannot be merged.
    """
    peft = sys.modules["peft"]
    model = model_inside(module)
    modules = list(modules_by_prefix(module))
    root = next(prefix for prefix, child in modules if child is model)
    inner: dict[str, tuple[str, ...]] = {}
    terms: dict[str, tuple[Term, ...]] = {}
    known = set(held)
    for prefix, child in modules:
        path = _inner_path(prefix, child, peft)
        if path is not None:
            inner[prefix] = path
        if _is(child, peft.tuners.lora.LoraLayer):
            terms |= _layer_terms(prefix, child, known)
    names = {name: clean for name in held if (clean := _name_in_model(name, root, inner)) is not None}
    return Tuned(root=root, names=names, terms={names[name]: found for name, found in terms.items()})


def model_inside(module: nn.Module) -> nn.Module:
    """The user's model, whose modules PEFT has wrapped. Raises `UnsupportedError` for what is no LoRA."""
    peft, outer = sys.modules["peft"], unwrap(module)
    if isinstance(outer, peft.PeftMixedModel):
        raise UnsupportedError("a PeftMixedModel cannot be exported; use a PeftModel with LoRA adapters only")
    if not isinstance(outer, peft.PeftModel):
        return outer
    active: Any = outer.active_adapters
    for adapter in active:
        kind = outer.peft_config[adapter].peft_type
        if kind != peft.PeftType.LORA:
            raise UnsupportedError(
                f"adapter {adapter!r} is of PEFT type {kind.value}; only LORA can be exported. Merge it into a copy of "
                f"the model, and sync that"
            )
    return unwrap(outer.get_base_model())


def _inner_path(prefix: str, module: nn.Module, peft: ModuleType) -> tuple[str, ...] | None:
    """Where under a module of PEFT the tensors of the merged model lie; None for other modules."""
    where = prefix.removesuffix(".")
    wrapper: Any = module
    if _is(module, peft.utils.other.ModulesToSaveWrapper):
        _check_enabled(where, wrapper)
        kept = [adapter for adapter in wrapper.active_adapters if adapter in wrapper.modules_to_save]
        return ("modules_to_save", kept[0]) if kept else ("original_module",)
    if _is(module, peft.tuners.lora.LoraLayer):
        return ("base_layer",)
    if _is(module, peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper):
        raise UnsupportedError(
            f"{where} is a {_seen(module)} of PEFT, which cannot be exported; of PEFT's layers LoRA and "
            f"modules_to_save can"
        )
    return None


def _layer_terms(prefix: str, layer: Any, known: set[str]) -> dict[str, tuple[Term, ...]]:
    """By the name in the module of the weight and bias that something is added to."""
    where = prefix.removesuffix(".")
    _check_layer(where, layer)
    _check_enabled(where, layer)
    kind = _own_kind(layer)
    adapters = [adapter for adapter in layer.active_adapters if adapter in layer.scaling]
    weights = [_weight_term(prefix, layer, kind, adapter) for adapter in adapters]
    if len(weights) > 1 and any(term.magnitude for term in weights):
        raise UnsupportedError(
            f"{where} has active adapters {first_five(adapters)}, one of them DoRA; with DoRA only one may be active"
        )
    biases = [
        Term(
            adapter=adapter,
            b=f"{prefix}lora_B.{adapter}.bias",
            a=None,
            transposed=False,
            scaling=float(layer.scaling[adapter]),
        )
        for adapter in adapters
        if layer.lora_bias.get(adapter)
    ]
    found = {_target(prefix, layer, kind): tuple(weights), f"{prefix}base_layer.bias": tuple(biases)}
    if biases and f"{prefix}base_layer.bias" not in known:
        raise UnsupportedError(f"{where} has no bias that the lora_bias of {first_five(adapters)} could be added to")
    return {name: terms for name, terms in found.items() if terms}


def _target(prefix: str, layer: Any, kind: str) -> str:
    """The tensor that the factors belong to. Wrappers of several parameters of one module are nested."""
    path, inner = f"{prefix}base_layer.", layer.base_layer
    while kind == "ParamWrapper" and _own_kind(inner) == kind:
        path, inner = f"{path}base_layer.", inner.base_layer
    return path + (layer.parameter_name if kind == "ParamWrapper" else "weight")


def _weight_term(prefix: str, layer: Any, kind: str, adapter: str) -> Term:
    embedding = kind == "Embedding"
    stack = kind == "ParamWrapper" and layer._param_ndim == 3
    transposed = not layer._did_swap_in_out_features if stack else getattr(layer, "fan_in_fan_out", False)
    return Term(
        adapter=adapter,
        b=f"{prefix}lora_embedding_B.{adapter}" if embedding else f"{prefix}lora_B.{adapter}.weight",
        a=f"{prefix}lora_embedding_A.{adapter}" if embedding else f"{prefix}lora_A.{adapter}.weight",
        transposed=embedding or bool(transposed),
        experts=layer.num_experts if stack else 0,
        scaling=float(layer.scaling[adapter]),
        magnitude=f"{prefix}lora_magnitude_vector.{adapter}.weight" if adapter in layer.lora_variant else None,
    )


def _check_layer(where: str, layer: Any) -> None:
    """Raise `UnsupportedError` for layers, variants and shapes whose merge is not `b @ a`."""
    kind = _own_kind(layer)
    if kind not in _MERGEABLE:
        raise UnsupportedError(
            f"{where} is a {_seen(layer)}, whose merged weight wsync cannot compute; it merges LoRA on "
            f"{', '.join(_MERGEABLE)} layers that are not quantised"
        )
    for adapter, variant in layer.lora_variant.items():
        if adapter in layer.active_adapters and not type(variant).__name__.startswith("Dora"):
            raise UnsupportedError(
                f"{where}: adapter {adapter!r} is the LoRA variant {type(variant).__name__}, which cannot be merged "
                f"into a weight; plain LoRA, rsLoRA and DoRA can"
            )
    if getattr(layer.get_base_layer(), "groups", 1) > 1:
        raise UnsupportedError(f"{where} is a convolution in {layer.get_base_layer().groups} groups; PEFT cannot merge")


def _check_enabled(where: str, layer: Any) -> None:
    if layer.disable_adapters:
        raise UnsupportedError(
            f"the adapters of {where} are disabled; leave disable_adapter() or call enable_adapter_layers() before a "
            f"sync, or pass a copy of the base model to sync that"
        )
    merged: Sequence[str] = getattr(layer, "merged_adapters", ())
    if merged:
        raise UnsupportedError(
            f"{where} has its adapters {first_five(list(merged))} merged into the base weight; call unmerge_adapter() "
            f"before a sync, which merges on its own and leaves the base weight alone"
        )


def _is(module: nn.Module, *kinds: type) -> bool:
    # Not isinstance: these are abstract classes, which makes it 20 times slower, and every module is asked.
    return not set(kinds).isdisjoint(type(module).__mro__)


def _own_kind(layer: object) -> str:
    """The name of the class in PEFT's file of unquantised layers, or ""; `fully_shard` derives classes of its own."""
    kind = next(_peft_classes(layer), None)
    return kind.__name__ if kind is not None and kind.__module__ == "peft.tuners.lora.layer" else ""


def _seen(layer: object) -> str:
    kind = next(_peft_classes(layer), type(layer))
    return f"{kind.__module__}.{kind.__name__}"


def _peft_classes(layer: object) -> Iterator[type]:
    return (kind for kind in type(layer).__mro__ if kind.__module__.partition(".")[0] == "peft")


def _name_in_model(name: str, root: str, inner: Mapping[str, tuple[str, ...]]) -> str | None:
    """The name without what PEFT put in between; None for tensors that the merged model does not have."""
    if not name.startswith(root):
        return None
    kept: list[str] = []
    here, rest = root, name.removeprefix(root).split(".")
    while rest:
        path = inner.get(here)
        if path is None:
            kept.append(rest[0])
        elif tuple(rest[: len(path)]) != path:
            return None
        step = len(path or rest[:1])
        here, rest = f"{here}{'.'.join(rest[:step])}.", rest[step:]
    return ".".join(kept)
