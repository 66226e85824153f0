"""Offload of DeepSpeed engines of ZeRO stage 1 to 3, through the engine's own `offload_states` and `reload_states`.

DeepSpeed keeps the bytes in host memory of its own, and moves its flat buffers; parameter objects stay the same.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch

from wsync.adapters.trainers.deepspeed import DeepSpeedProducer
from wsync.deadline import Deadline
from wsync.errors import MemoryStateError, UnsupportedError
from wsync.memory.host_pool import HostPool
from wsync.memory.resident import Resident, require_away, require_present
from wsync.memory.storages import inner_tensors, storages_of

_TESTED = "0.19.8"
_MODEL = ("lp_params", "lp_grads", "contiguous_grad_buffer")
_OPTIMIZER = ("hp_params", "optim_states")

_HOLDERS = {
    1: {
        "lp_params": "bit16_groups_flat",
        "lp_grads": "averaged_gradients",
        "hp_params": "single_partition_of_fp32_groups",
    },
    3: {
        "lp_params": "lp_param_buffer",
        "lp_grads": "grad_partitions_flat_buffer",
        "contiguous_grad_buffer": "ipg_buckets",
        "hp_params": "fp32_partitioned_groups_flat",
    },
}
"""ZeRO stage -> state -> attribute of DeepSpeed's optimizer that holds it. Stage 2 is as stage 1."""


class DeepSpeedModelMemory:
    """See `wsync.memory.residents.TrainerMemory`: the weights and gradients that the engine trains with."""

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is an engine, or a module with parts or parameters of DeepSpeed's in it."""
        return DeepSpeedProducer.matches(obj)

    @staticmethod
    def resident(name: str, model: Any, pool: HostPool) -> Resident:
        """See `TrainerMemory`."""
        return _EngineStates(name, model, _MODEL, pool)


class DeepSpeedOptimizerMemory:
    """See `wsync.memory.residents.TrainerMemory`: the full-precision weights and the states of the optimizer."""

    @staticmethod
    def matches(obj: object) -> bool:
        """Whether `obj` is an engine, or an optimizer that only an engine can move."""
        own = any(kind.__module__.startswith("deepspeed.") for kind in type(obj).__mro__)
        return own and not isinstance(obj, torch.optim.Optimizer)

    @staticmethod
    def resident(name: str, optimizer: Any, pool: HostPool) -> Resident:
        """See `TrainerMemory`."""
        return _EngineStates(name, optimizer, _OPTIMIZER, pool)


class _EngineStates:
    """Some of an engine's states. Others of the same engine come and go on their own."""

    def __init__(self, name: str, engine: Any, states: tuple[str, ...], pool: HostPool) -> None:
        _check_engine(name, engine)
        self.name = name
        self._engine = engine
        self._zero = engine.optimizer
        self._stage = 3 if engine.zero_optimization_stage() == 3 else 1
        self._states = states
        self._pool = pool
        self._away: int | None = None
        self._moved: set[Any] = set()
        self._keeps_host_memory = False

    @property
    def present(self) -> bool:
        """See `Resident`."""
        return self._away is None

    @property
    def nbytes(self) -> int:
        """See `Resident`."""
        if self._away is not None:
            return self._away
        found = storages_of(inner_tensors(t for state in self._states for t in self._tensors(state)))
        return sum(storage.nbytes() for storage in found.values())

    @property
    def host_nbytes(self) -> int:
        """See `Resident`. DeepSpeed's own host memory, not the pool's."""
        return self.nbytes

    def check_release(self) -> None:
        """See `Resident`. Raises `UnsupportedError` for what DeepSpeed does not move, `AdmissionError` without room."""
        require_present(self)
        self._check_supported()
        already = sorted(state.value for state in self._zero.offloaded_states if state.value in self._states)
        if already:
            raise MemoryStateError(
                f"{', '.join(already)} of {self.name} were moved by offload_states() of the engine; call its "
                f"reload_states(), and leave both to wsync"
            )
        gradients = self._zero.averaged_gradients
        if self._stage == 3 and any(gradient is not None for gradient in gradients.values()):
            raise MemoryStateError(
                f"{self.name} has gradients of a step that was not made, and DeepSpeed would lose them; "
                f"call step() of the engine, then release"
            )
        if not self._keeps_host_memory:
            self._pool.check(self.name, [self.nbytes], pinned=False)

    def check_restore(self) -> None:
        """See `Resident`."""
        require_away(self)
        back = sorted(state.value for state in self._moved - self._zero.offloaded_states)
        if back:
            raise MemoryStateError(
                f"{', '.join(back)} of {self.name} came back by reload_states() of the engine; call its "
                f"offload_states(), and leave both to wsync"
            )

    def release(self, deadline: Deadline) -> None:
        """See `Resident`. DeepSpeed's own call has no deadline: it is not begun after this one."""
        self.check_release()
        deadline.remaining(f"{self.name} to be offloaded by DeepSpeed")
        nbytes = self.nbytes
        wanted = self._enum(self._states)
        try:
            self._offload(wanted)
        except BaseException:
            self._reload(wanted & self._zero.offloaded_states)
            raise
        self._moved = wanted & self._zero.offloaded_states
        self._keeps_host_memory = self._stage == 3
        self._away = nbytes

    def restore(self, deadline: Deadline) -> None:
        """See `Resident`. DeepSpeed's own call has no deadline: it is not begun after this one."""
        self.check_restore()
        deadline.remaining(f"{self.name} to be reloaded by DeepSpeed")
        try:
            self._reload(self._moved)
        except BaseException:
            self._offload(self._moved - self._zero.offloaded_states)
            raise
        self._moved = set()
        self._away = None

    def _check_supported(self) -> None:
        engine = self._engine
        place = engine.zero_offload_param()
        if place is not None and place.device != "none":
            raise UnsupportedError(
                f"{self.name} has its parameters in host memory already (offload_param); DeepSpeed moves nothing then. "
                f"Leave it out, or switch that off"
            )
        holders = [_HOLDERS[self._stage].get(state) for state in self._states]
        missing = [holder for holder in holders if holder is not None and not hasattr(self._zero, holder)]
        if missing:
            raise UnsupportedError(
                f"DeepSpeed {_version()} has no {', '.join(missing)} for {self.name}; wsync was tested with {_TESTED}"
            )
        if self._states != _OPTIMIZER:
            return
        if engine.zero_use_cpu_optimizer():
            raise UnsupportedError(
                f"{self.name} is in host memory already (offload_optimizer); leave it out, or switch that off"
            )
        own = import_module("deepspeed").ops.adam.fused_adam.FusedAdam
        if self._stage == 3 and type(self._zero.optimizer) is not own:
            raise UnsupportedError(
                f"{self.name}: at ZeRO stage 3 DeepSpeed {_version()} moves the states of its own FusedAdam only, and "
                f"this is a {type(self._zero.optimizer).__name__}; use FusedAdam, stage 1 or 2, or leave it out"
            )

    def _tensors(self, state: str) -> Iterator[torch.Tensor]:
        if state == "optim_states":
            for of_parameter in self._zero.optimizer.state.values():
                values = {k: v for k, v in of_parameter.items() if not k.endswith("_offload_buffer")}
                yield from _tensors_in(values)
        else:
            holder = _HOLDERS[self._stage].get(state)
            yield from _tensors_in(getattr(self._zero, holder, None) if holder else None)

    def _enum(self, states: tuple[str, ...]) -> set[Any]:
        kinds = import_module("deepspeed.runtime.zero.offload_config").OffloadStateTypeEnum
        return {kinds(state) for state in states}

    def _offload(self, states: set[Any]) -> None:
        self._engine.offload_states(include=states)

    def _reload(self, states: set[Any]) -> None:
        """`reload_states` brings back all that is away; what others released stays away."""
        others = self._zero.offloaded_states - states
        self._zero.offloaded_states -= others
        try:
            self._engine.reload_states()
        finally:
            self._zero.offloaded_states |= others


def _check_engine(name: str, engine: Any) -> None:
    """Raise `UnsupportedError` unless `engine` can offload states at all."""
    kinds = [kind.__name__ for kind in type(engine).__mro__ if kind.__module__.startswith("deepspeed.")]
    if "DeepSpeedEngine" not in kinds:
        raise UnsupportedError(
            f"{name} is a {type(engine).__name__} that DeepSpeed has laid out; pass the engine that "
            f"deepspeed.initialize returned, which can move it"
        )
    stage = engine.zero_optimization_stage()
    if stage == 0:
        raise UnsupportedError(
            f"{name} is a DeepSpeed engine of ZeRO stage 0, which moves nothing by itself; its module is a plain one: "
            f"pass engine.module, and the torch optimizer that you gave to initialize"
        )
    calls = [(engine, "offload_states"), (engine, "reload_states"), (engine.optimizer, "offload_states")]
    calls += [(engine.optimizer, "reload_states"), (engine.optimizer, "offloaded_states")]
    missing = sorted({f"{type(where).__name__}.{call}" for where, call in calls if not hasattr(where, call)})
    if missing:
        raise UnsupportedError(
            f"{name} is a DeepSpeed {_version()} engine of ZeRO stage {stage} without {', '.join(missing)}: an engine "
            f"without an optimizer, or another version than {_TESTED}, which wsync was tested with. Leave it out"
        )


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Tensors in what DeepSpeed keeps: lists, mappings, gradient buckets with a `buffer`, or nothing at all."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(inner)
    else:
        buffer = getattr(value, "buffer", None)
        if isinstance(buffer, torch.Tensor):
            yield buffer


def _version() -> str:
    return str(getattr(sys.modules["deepspeed"], "__version__", "of unknown version"))
