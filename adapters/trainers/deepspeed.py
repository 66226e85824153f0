"""Producer for DeepSpeed engines of ZeRO stage 0 to 3, their modules, and modules made under `zero.Init`.

Stages 0 to 2 keep every parameter whole on every rank. Stage 3 keeps 1/N of each flattened parameter, padded at the
end, in `ds_tensor`, whatever the parameter itself shows at the moment. These runs are what is exported.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from wsync.adapters.trainers.names import Held, held_tensors, modules_by_prefix
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.errors import UnsupportedError, first_five
from wsync.group import Group
from wsync.plan import Plan

SUPPORTED = (
    "deepspeed.DeepSpeedEngine (what deepspeed.initialize returns) with ZeRO stage 0, 1, 2 or 3, its module, "
    "or a module made under deepspeed.zero.Init"
)
_TESTED = "0.19.8"

_REFUSED_MODULES = {
    "deepspeed.module_inject.auto_ep": "experts spread over ranks by DeepSpeed",
    "deepspeed.moe": "experts spread over ranks by DeepSpeed",
    "deepspeed.module_inject": "slices of DeepSpeed's tensor parallelism (AutoTP)",
    "deepspeed.runtime.pipe": "one stage of a DeepSpeed pipeline",
    "deepspeed.linear": "DeepSpeed's optimized linear layers, whose weights are split or quantised",
    "deepspeed.ops": "DeepSpeed's inference kernels, which rearrange weights",
    "deepspeed.model_implementations": "DeepSpeed's inference kernels, which rearrange weights",
}
"""Where a class is defined -> what its parameters are, if they are not the tensors of the checkpoint."""

_ENGINE = ("module", "pipeline_parallelism", "has_moe_layers", "autotp_size", "mp_world_size", "is_deepcompile_active")
_PARTITION = ("ds_shape", "ds_numel", "ds_zero_partition_rank", "ds_zero_partition_world_size", "ds_tensor")
_GATHERED_DEPTH = "DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR"


class DeepSpeedProducer(ShardedProducer):
    """Exports the module's weights in the dtype that the engine trains with, not the fp32 copies of its optimizer.

    Args:
        actor: an engine, its module, or a module made under `deepspeed.zero.Init`.

    Raises:
        UnsupportedError: another wrapper of DeepSpeed's, or parallelism under which ranks hold different tensors.
    """

    def __init__(self, actor: nn.Module) -> None:
        super().__init__(_module_of(actor))
        self._partitions: Counter[int] = Counter()

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is of DeepSpeed's, or a module with parts or parameters of DeepSpeed's in it."""
        if not isinstance(obj, nn.Module) or "deepspeed" not in sys.modules:
            return False
        return any(_deepspeed_class(child) is not None for child in obj.modules()) or any(
            hasattr(parameter, "ds_id") for parameter in obj.parameters()
        )

    def prepare(self, plan: Plan, senders: Sequence[int], group: Group) -> None:
        """See `wsync.Producer`. Raises `UnsupportedError` if parameters are partitioned over only some of the ranks."""
        odd = {size: count for size, count in self._partitions.items() if size != group.world_size}
        if odd:
            raise UnsupportedError(
                f"{sum(odd.values())} parameters are partitioned over groups of {sorted(odd)} ranks, but "
                f"{group.world_size} trainer ranks take part; what the other groups hold may be other tensors "
                f"(tensor, expert or pipeline parallelism), so only a partition over all of them can be exported"
            )
        super().prepare(plan, senders, group)

    def _held(self, module: nn.Module) -> Mapping[str, Held]:
        _check_modules(module)
        found: dict[str, Held] = held_tensors(module)
        partitioned: dict[str, Any] = {n: item.tensor for n, item in found.items() if hasattr(item.tensor, "ds_id")}
        problems = list(_problems(partitioned))
        if problems:
            raise UnsupportedError(
                f"{len(problems)} parameters partitioned by DeepSpeed cannot be exported now: {first_five(problems)}"
            )
        # Tied parameters are one object, and must stay one.
        runs = {id(parameter): _run(parameter) for parameter in partitioned.values()}
        self._partitions = Counter(parameter.ds_zero_partition_world_size for parameter in partitioned.values())
        return found | {name: runs[id(parameter)] for name, parameter in partitioned.items()}


def _version() -> str:
    return str(getattr(sys.modules["deepspeed"], "__version__", "of unknown version"))


def _deepspeed_class(obj: object) -> type | None:
    """The class of DeepSpeed's own that `obj` is of, or that its class was derived from."""
    return next((kind for kind in type(obj).__mro__ if kind.__module__.startswith("deepspeed.")), None)


def _module_of(actor: nn.Module) -> nn.Module:
    """The module that is trained. Raises `UnsupportedError` for wrappers and parallelism that cannot be exported."""
    kind = _deepspeed_class(actor)
    if kind is None:
        return actor
    if kind.__name__ != "DeepSpeedEngine":
        raise UnsupportedError(f"{kind.__module__}.{kind.__name__} cannot be exported. Supported: {SUPPORTED}")
    engine: Any = actor
    missing = [name for name in _ENGINE if not hasattr(engine, name)]
    if missing:
        raise UnsupportedError(f"DeepSpeed {_version()} has no {first_five(missing)}; wsync was tested with {_TESTED}")
    refusals = {
        "pipeline parallelism": engine.pipeline_parallelism,
        "expert parallelism (deepspeed.moe, AutoEP)": engine.has_moe_layers,
        "tensor parallelism (AutoTP, or an mpu of your own)": engine.autotp_size() > 1 or engine.mp_world_size > 1,
        "DeepCompile": engine.is_deepcompile_active(),
    }
    found = [name for name, present in refusals.items() if present]
    if found:
        raise UnsupportedError(f"a DeepSpeed engine with {', '.join(found)} cannot be exported; switch that off")
    module: nn.Module = engine.module
    return module


def _check_modules(module: nn.Module) -> None:
    refused = []
    for prefix, child in modules_by_prefix(module):
        kind = _deepspeed_class(child)
        what = kind and next((w for where, w in _REFUSED_MODULES.items() if kind.__module__.startswith(where)), None)
        if kind and what:
            refused.append(f"{prefix.rstrip('.') or 'the module itself'} ({kind.__name__}) holds {what}")
    if refused:
        raise UnsupportedError(
            f"{first_five(refused)}. Their tensors are not those of the checkpoint. Supported: {SUPPORTED}"
        )


def _problems(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Why a partitioned parameter cannot be exported, one sentence each."""
    depth = getattr(sys.modules["deepspeed.runtime.zero.partition_parameters"], _GATHERED_DEPTH, None)
    for name, parameter in parameters.items():
        missing = [attribute for attribute in _PARTITION if getattr(parameter, attribute, None) is None]
        if missing or depth is None:
            yield (
                f"{name}: DeepSpeed {_version()} does not say {', '.join(missing) or _GATHERED_DEPTH}; "
                f"wsync was tested with {_TESTED}"
            )
            continue
        part = parameter.ds_tensor
        if part.final_location == "nvme":
            yield f"{name} is offloaded to NVMe; offload parameters to the CPU instead"
        elif hasattr(part, "ds_quant_scale"):
            yield f"{name} is kept quantised (zero_quantized_nontrainable_weights); switch that off"
        elif getattr(parameter, depth, 0):
            yield (
                f"{name} is inside deepspeed.zero.GatheredParameters, and edits in there reach the partitions when it "
                f"ends; leave it first, wsync gathers by itself"
            )


def _run(parameter: torch.Tensor) -> Held:
    """This rank's part of a ZeRO-3 parameter, without the padding."""
    zero: Any = parameter
    part, numel = zero.ds_tensor, zero.ds_numel
    start = min(zero.ds_zero_partition_rank * part.ds_numel, numel)
    run = part.detach().view(-1)[: min(part.ds_numel, numel - start)]
    return Held(tensor=run, shape=tuple(zero.ds_shape), optional=False, start=start)
