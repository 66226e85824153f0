"""Which tensors a module holds, and what the engine calls them.

A module names its tensors by the way they are wrapped and stored in memory. Engines use the names and the layout of
the Hugging Face checkpoint: no wrapper prefixes, tied weights once, stacked experts one by one.
"""

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from wsync.errors import UnsupportedError, first_five
from wsync.extras import importing
from wsync.regions import Region

WRAPPER_CHILDREN = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
"""What FSDP1, `torch.compile` and activation checkpointing call the module that they wrap."""

_MODULE_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter or buffer of a module, or this rank's part of one."""

    tensor: torch.Tensor
    """The live tensor: plain, a DTensor of the full shape, or the 1-D part that begins at `start`."""

    shape: tuple[int, ...]
    """Of the full tensor."""

    optional: bool
    """A non-persistent buffer: checkpoints do not have it."""

    start: int | None = None
    """Where in the flattened full tensor `tensor` begins, if it is a run of that; None if it has the full shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An engine-side tensor as part of what the module holds."""

    name: str
    """Engine-side name."""

    shape: tuple[int, ...]
    """Engine-side shape."""

    parent: str
    """Key in `held_tensors` of the parameter or buffer that it is part of."""

    region: Region
    """Positions in the parent's flattened full tensor, in the order of the engine-side tensor's elements."""

    optional: bool
    """As in `Held`."""


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside wrappers of DDP, `torch.compile`, FSDP1 and activation checkpointing."""
    while True:
        child = next((inner for name, inner in module._modules.items() if _is_wrapper(module, name)), None)
        if child is None:
            return module
        module = child


def held_tensors(module: nn.Module) -> dict[str, Held]:
    """Every parameter and buffer by its name without wrappers, in state-dict order, tied ones under each name."""
    return {
        name: Held(tensor=tensor, shape=() if is_lazy(tensor) else tuple(tensor.shape), optional=optional)
        for prefix, child in modules_by_prefix(module)
        for name, tensor, optional in own_tensors(child, prefix)
    }


def modules_by_prefix(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(what the names of its tensors begin with, module) for `module` and all below it; a module comes once a name."""
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from modules_by_prefix(child, prefix if _is_wrapper(module, name) else f"{prefix}{name}.")


def own_tensors(module: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, is a non-persistent buffer) of what lies in `module` itself.

    Not `named_parameters`: wrappers override it in different ways.
    """
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, parameter, False
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield prefix + name, buffer, name in module._non_persistent_buffers_set


def sources(module: nn.Module, held: Mapping[str, Held]) -> list[Source]:
    """What the engine is to receive from `module`, whose tensors are `held`. The same on every rank.

    Raises:
        UnsupportedError: a checkpoint tensor is computed from parameters instead of being a part of one.
    """
    model = unwrap(module)
    kept = _without_ties(model, held)
    persistent = {name: item for name, item in kept.items() if not item.optional}
    found = _checkpoint_layout(model, persistent) if _is_transformers(model) else as_held(persistent)
    return [*found, *as_held({name: item for name, item in kept.items() if item.optional})]


def left_out(held: Mapping[str, Held], exported: Collection[str]) -> dict[str, str | None]:
    """Each name in `held` that a checkpoint has and that is not exported -> the exported one that it is tied to."""
    ties = {_identity(held[name].tensor): name for name in exported if name in held}
    return {
        name: ties.get(_identity(item.tensor))
        for name, item in held.items()
        if name not in exported and not item.optional
    }


def _is_wrapper(module: nn.Module, child: str) -> bool:
    return child in WRAPPER_CHILDREN or (child == "module" and isinstance(module, _MODULE_WRAPPERS))


def _without_ties(model: nn.Module, held: Mapping[str, Held]) -> dict[str, Held]:
    """Each tied tensor once: under the first name that the model does not declare as tied to another."""
    groups: dict[object, list[str]] = {}
    for name, item in held.items():
        groups.setdefault(_identity(item.tensor), []).append(name)
    declared: Iterable[str] = (
        getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    )
    tied = list(declared)
    kept = set()
    for names in groups.values():
        persistent = [name for name in names if not held[name].optional] or names
        free = [name for name in persistent if not any(re.search(pattern, name) for pattern in tied)]
        kept.add((free or persistent)[0])
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    return {name: item for name, item in held.items() if name in kept - ignored}


def _identity(tensor: torch.Tensor) -> object:
    """Equal for tensors that are one and the same memory. Ranks without a part of a DTensor must agree too."""
    if isinstance(tensor, DTensor) or tensor.numel() == 0 or tensor.layout != torch.strided:
        return id(tensor)
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def as_held(held: Mapping[str, Held]) -> list[Source]:
    """Each tensor as it is held, under its own name."""
    return [
        Source(
            name=name,
            shape=item.shape,
            parent=name,
            region=Region.whole(item.shape),
            optional=item.optional,
        )
        for name, item in held.items()
    ]


def _is_transformers(model: nn.Module) -> bool:
    """Whether `model` is a `transformers.PreTrainedModel`; nobody can have made one without importing it."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def _checkpoint_layout(model: nn.Module, held: Mapping[str, Held]) -> list[Source]:
    """Run transformers' own in-memory-to-checkpoint conversion on meta tensors and read off where each output lies."""
    with importing("hf", f"the names of {type(model).__name__}"):
        from transformers.core_model_loading import revert_weight_conversion

    trace = _Trace()
    meta: dict[str, torch.Tensor] = {}
    for name, item in held.items():
        meta[name] = torch.empty(item.shape, dtype=item.tensor.dtype, device="meta")
        trace.remember(meta[name], name, Region.whole(item.shape))
    with torch.no_grad(), trace:
        converted: Mapping[str, torch.Tensor] = revert_weight_conversion(model, dict(meta))
    found, derived = [], []
    for name, tensor in converted.items():
        origin = trace.origin(tensor)
        if origin is None or tensor.dtype != meta[origin[0]].dtype:
            derived.append(name)
            continue
        parent, region = origin
        found.append(Source(name=name, shape=tuple(tensor.shape), parent=parent, region=region, optional=False))
    if derived:
        raise UnsupportedError(
            f"{len(derived)} checkpoint tensors of {type(model).__name__} are computed from parameters instead of "
            f"being parts of one: {first_five(derived)}. Only splits, stacks, slices and transposes can be exported"
        )
    return found


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows views through copies: which part of which parameter a tensor enumerates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bases: dict[int, tuple[str, Region]] = {}
        self._alive: list[torch.Tensor] = []

    def remember(self, tensor: torch.Tensor, parent: str, region: Region) -> None:
        """`tensor` is contiguous and fresh, and holds `region` of `parent`."""
        self._bases[tensor.untyped_storage()._cdata] = (parent, region)
        self._alive.append(tensor)  # an address is no identity once its storage is freed

    def origin(self, tensor: torch.Tensor) -> tuple[str, Region] | None:
        """Parent and region of a view of anything remembered, else None."""
        base = self._bases.get(tensor.untyped_storage()._cdata)
        if base is None:
            return None
        parent, region = base
        if tensor.numel() == 0:
            return parent, Region.span(0, 0)
        found = region.select(Region(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()))
        return (parent, found[0]) if len(found) == 1 else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default and result.is_contiguous():
            origin = self.origin(args[0])
            if origin is not None:
                self.remember(result, *origin)
        return result
