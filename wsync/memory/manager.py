"""What may sit in device memory, and when, for a trainer and engines that share their devices.

memory = wsync.MemoryManager(engine=llm, models={"actor": actor}, optimizers={"adamw": optimizer})
while training:
    memory.enter("rollout")
    answers = llm.generate(...)
    memory.enter("train")
    ...
    wsync.sync(actor, llm, memory=memory)       # enters "sync" first, and "rollout" afterwards

An engine with devices of its own is passed with `colocated=False`: then it only gives up its KV cache for a sync.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from wsync import registry
from wsync.config import PauseMode
from wsync.errors import ConfigError, MemoryStateError, first_five
from wsync.memory.device import Device
from wsync.memory.engine_tag import EngineTag, engine_tags
from wsync.memory.generation import Generation
from wsync.memory.host_pool import HostPool
from wsync.memory.phases import Phases
from wsync.memory.resident import Resident
from wsync.memory.residents import resident_for_model, resident_for_optimizer
from wsync.protocols import Engine
from wsync.trainer_ranks import new_group

_NONE: Mapping[str, Any] = {}
_managed: "weakref.WeakKeyDictionary[object, weakref.ref[MemoryManager]]" = weakref.WeakKeyDictionary()


class MemoryManager(Phases):
    """Moves models, optimizer states and engines on and off the device, phase by phase.

    Three operations that are never mixed up: an engine sleeps and wakes by tag; a model's storages go to host memory
    and come back; an optimizer's states do. All objects stay the same. Every trainer rank makes a manager.
    """

    def __init__(
        self,
        *,
        engine: object = None,
        models: Mapping[str, Any] = _NONE,
        optimizers: Mapping[str, Any] = _NONE,
        frozen: Mapping[str, Any] = _NONE,
        phases: Mapping[str, Sequence[str]] = _NONE,
        sleep_level: int = 2,
        colocated: bool = True,
        pause: PauseMode = "wait",
        host_bytes: int | None = None,
        timeout_s: float = 120.0,
        device: Device | None = None,
    ) -> None:
        """Nothing moves before the first `enter`: all that is given is on the device now.

        Args:
            engine: as for `wsync.sync`; None on ranks that own none.
            models: name -> module in training. The first is the actor, which a sync needs.
            optimizers: name -> `torch.optim.Optimizer`.
            frozen: name -> module that is only used within `using(name)`, one at a time.
            phases: more phases, or other ones in place of "rollout", "sync" and "train": name -> residents in the order
                in which they come.
            sleep_level: 2 drops the engine's weights, which the next sync brings back; 1 keeps them in host memory, as
                adapters alone need it.
            colocated: whether the engine's workers share the trainer's devices. If not, only the KV cache leaves, for
                the time of a sync, with the engine paused before: its weights stay, and so does the trainer.
            pause: what becomes of requests in flight then, see `SyncConfig.pause`.
            host_bytes: most host memory, in bytes, for what is offloaded; default: what the host has.
            timeout_s: longest wait for one step.
            device: where all of it is; default: where the first model is.

        Raises:
            ConfigError: a name is there twice, a phase names what does not exist, or an engine has a manager already.
            UnsupportedError: something cannot be offloaded; says what and why.
        """
        engines = [registry.engine_for(one) for one in registry.as_list(engine)]
        for one in engines:
            other = _managed.get(one)
            if other is not None and other() is not None:
                raise ConfigError(f"{one.name} has a memory manager already; close that one first")
        if sleep_level not in (1, 2):
            raise ConfigError(f"sleep_level is {sleep_level}; 1 keeps the weights in host memory, 2 drops them")
        self._pool = HostPool(host_bytes)
        prefixes = ["engine" if len(engines) == 1 else f"engine {number}" for number in range(len(engines))]
        named = list(zip(engines, prefixes, strict=True))
        of_optimizers = [resident_for_optimizer(name, one, self._pool) for name, one in optimizers.items()]
        of_models = [resident_for_model(name, model, self._pool) for name, model in {**models, **frozen}.items()]
        of_engines: list[list[Resident]]
        if colocated:
            of_engines = [list(engine_tags(one, prefix, sleep_level)) for one, prefix in named]
        else:
            of_engines = [_lent(one, prefix, sleep_level, pause) for one, prefix in named]
        names = [[part.name for part in parts] for parts in of_engines]
        standard = _standard_phases if colocated else _separate_phases
        super().__init__(
            [*(part for parts in of_engines for part in parts), *of_optimizers, *of_models],
            {**standard(names, list(models), list(optimizers)), **phases},
            device=device or _device_of(models),
            group=new_group("memory", timeout_s),
            together=names if colocated else (),
        )
        for one in engines:
            _managed[one] = weakref.ref(self)
        self._engines = engines

    def report_memory(self, prefix: str = "") -> str:
        """One line for a log: what is taken now, and by whom."""
        return self.ledger.report_memory(prefix)

    def close(self) -> None:
        """Let go of the engines and of the host memory. Raises `MemoryStateError` while something lies there."""
        residents = self.residents.values()
        away = [resident.name for resident in residents if resident.host_nbytes and not resident.present]
        if away:
            raise MemoryStateError(f"{first_five(away)} would be lost; enter a phase that has them first")
        for one in self._engines:
            _managed.pop(one, None)
        self._engines = []
        self._pool.close()


def _standard_phases(
    tags: Sequence[Sequence[str]], models: Sequence[str], optimizers: Sequence[str]
) -> Mapping[str, Sequence[str]]:
    """Rollout, sync and train, with engines' tags in the order in which they wake."""
    weights = [some[0] for some in tags]
    return {
        "rollout": [*weights, *(tag for some in tags for tag in some[1:])],
        "sync": [*models[:1], *weights],
        "train": [*models, *optimizers],
    }


def _lent(engine: Engine, prefix: str, level: int, pause: PauseMode) -> list[Resident]:
    """What an engine with devices of its own gives up for a sync, in that order."""
    return [Generation(engine, prefix, pause), EngineTag(engine, prefix, "kv_cache", level, alone=True)]


def _separate_phases(
    lent: Sequence[Sequence[str]], models: Sequence[str], optimizers: Sequence[str]
) -> Mapping[str, Sequence[str]]:
    """The trainer is always there. What engines gave up comes back in the other order."""
    trainer = [*models, *optimizers]
    serving = [*trainer, *(name for names in lent for name in reversed(names))]
    return {"rollout": serving, "sync": trainer, "train": serving}


def _device_of(models: Mapping[str, Any]) -> Device:
    """Of the first model's parameters; host memory without one."""
    for model in models.values():
        for parameter in model.parameters():
            if parameter.device.type == "cuda":
                from wsync.memory.cuda_device import CudaDevice

                return CudaDevice(parameter.device)
            break
    from wsync.memory.host_device import HostDevice

    return HostDevice()
