"""Producer for FSDP1 (`torch.distributed.fsdp.FullyShardedDataParallel`).

FSDP1 lays the parameters of a wrapped module one after the other in a flat parameter, of which each rank keeps a
contiguous 1/N. So a rank has of each original parameter one run of the flattened tensor, or nothing. FSDP1 has no
public way to read that off; its own metadata are used, and missed by name if a version of torch has them no more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from wsync.adapters.trainers.names import Held, modules_by_prefix, own_tensors
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.errors import UnsupportedError, first_five
from wsync.group import Group
from wsync.plan import Plan

_HANDLE = ("flat_param", "_training_state", "_use_orig_params")
_FLAT = (
    "_param_infos",
    "_shared_param_infos",
    "_shapes",
    "_contiguities",
    "_param_extensions",
    "_shard_param_infos",
)

_Places = dict[int, dict[str, Held]]
"""id of the module that the user wrote -> name in it -> what this rank holds of that parameter."""


class FSDP1Producer(ShardedProducer):
    """Exports the sharded, full-precision flat parameters: with mixed precision, the fp32 shards.

    Any sharding strategy, `use_orig_params` or not, nested, offloaded to the CPU or not. Parameters that FSDP1 does
    not manage count as replicated. The module is only read, whatever state it is in.
    """

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is a module with FSDP1 modules in it."""
        return isinstance(obj, nn.Module) and any(isinstance(m, FullyShardedDataParallel) for m in obj.modules())

    def prepare(self, plan: Plan, senders: Sequence[int], group: Group) -> None:
        """See `wsync.Producer`."""
        super().prepare(plan, senders, group)
        # Mixed precision casts buffers at the first forward. Most of them are not sent, and may then change.
        sent = {self._parents[spec.name] for spec in plan.specs}
        self._layouts = {name: layout for name, layout in self._layouts.items() if name in sent}

    def _held(self, module: nn.Module) -> Mapping[str, Held]:
        places: _Places = {}
        problems: list[str] = []
        for child in module.modules():
            handle = getattr(child, "_handle", None) if isinstance(child, FullyShardedDataParallel) else None
            if handle is not None:
                _check_version(handle)
                problems += _problems(handle)
                _place(handle, places)
        found: dict[str, Held] = {}
        for prefix, child in modules_by_prefix(module):
            here = places.get(id(child), {})
            found |= {prefix + name: held for name, held in here.items()}
            for name, tensor, optional in own_tensors(child, prefix):
                if isinstance(tensor, DTensor):
                    problems.append(f"{name} is a DTensor; use fully_shard (FSDP2) with tensor parallelism")
                if name.removeprefix(prefix) not in here and not isinstance(tensor, FlatParameter):
                    found[name] = Held(tensor=tensor, shape=tuple(tensor.shape), optional=optional)
        if problems:
            raise UnsupportedError(f"FSDP1 module {type(module).__name__}: {first_five(problems)}")
        return found


def _check_version(handle: Any) -> None:
    flat = getattr(handle, "flat_param", None)
    missing = [name for name in _HANDLE if not hasattr(handle, name)]
    missing += [name for name in _FLAT if not hasattr(flat, name)]
    if missing:
        raise UnsupportedError(
            f"FSDP1 of torch {torch.__version__} keeps no {first_five(missing)}, which wsync reads; "
            f"use fully_shard (FSDP2), or a torch version that wsync was tested with"
        )


def _problems(handle: Any) -> Iterator[str]:
    """Why a flat parameter cannot be exported now, one sentence each."""
    flat = handle.flat_param
    names = [f"{info.module_name}.{info.param_name}".lstrip(".") for info in flat._param_infos]
    if handle._training_state.name == "SUMMON_FULL_PARAMS":
        yield (
            f"{first_five(names)} are inside summon_full_params, and edits in there reach the shards when it ends; "
            f"leave it first"
        )
    elif handle._training_state.name != "IDLE":
        yield f"{first_five(names)} are in the middle of a {handle._training_state.name.lower()} pass; finish it first"
    for name, contiguous, extension in zip(names, flat._contiguities, flat._param_extensions, strict=True):
        if extension is not None:
            yield f"{name} was a DTensor before it was flattened; use fully_shard (FSDP2) with tensor parallelism"
        elif not contiguous:
            yield f"{name} was not contiguous when FSDP1 flattened it; make it contiguous before wrapping"
    if handle._use_orig_params:
        yield from _replaced(flat, names)


def _replaced(flat: Any, names: Iterable[str]) -> Iterator[str]:
    """Original parameters that were given other memory: FSDP1 takes it over at the next forward only."""
    shard = _shard(flat).untyped_storage()._cdata
    unsharded = getattr(flat, "_full_param_padded", flat).untyped_storage()._cdata
    for name, parameter in zip(names, flat._params, strict=True):
        if parameter.numel() and parameter.untyped_storage()._cdata not in (shard, unsharded):
            yield f"{name} was given other data since the last forward pass; run one first"


def _shard(flat: Any) -> torch.Tensor:
    """This rank's shard in full precision, 1-D, padded. Before the first forward the flat parameter itself is that."""
    shard: torch.Tensor = getattr(flat, "_local_shard", flat)
    return shard.detach()


def _place(handle: Any, places: _Places) -> None:
    """Enter every original parameter of a flat parameter."""
    flat = handle.flat_param
    shard = _shard(flat)
    for info, shape, part in zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True):
        offset, numel, start = (
            (part.offset_in_shard, part.numel_in_shard, part.intra_param_start_idx) if part.in_shard else (0, 0, 0)
        )
        run = shard[offset : offset + numel]
        held = Held(tensor=run, shape=tuple(shape), optional=False, start=start)
        places.setdefault(id(info.module), {})[info.param_name] = held
    for shared in flat._shared_param_infos:
        held = places[id(shared.prim_module)][shared.prim_param_name]
        places.setdefault(id(shared.module), {})[shared.param_name] = held
