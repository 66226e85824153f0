"""Cycles of offload beside a twin that never leaves memory, on real ranks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.distributed.flat_steps import unequal
from wsync.deadline import Deadline
from wsync.memory.host_pool import HostPool
from wsync.memory.resident import Resident
from wsync.memory.residents import resident_for_model, resident_for_optimizer
from wsync.memory.storages import inner_tensors


def soon() -> Deadline:
    return Deadline.after(60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model with an optimizer that has states."""

    model: Any
    optimizer: torch.optim.Optimizer
    full: Callable[[Any], dict[str, torch.Tensor]]
    """*Collective.* Every checkpoint tensor."""

    @classmethod
    def of(cls, model: nn.Module, full: Callable[[Any], dict[str, torch.Tensor]]) -> "Trained":
        """With an AdamW of what trains."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return cls(model=model, optimizer=torch.optim.AdamW(trained, lr=0.01), full=full)

    def step(self, seed: int) -> None:
        """One step, then a forward without gradients, which leaves the root of FSDP unsharded."""
        model = getattr(self.model, "_orig_mod", self.model)  # compiling takes longer than everything else here
        tokens = torch.randint(0, 60, (2, 8), generator=torch.Generator().manual_seed(seed))
        model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            model(input_ids=tokens)


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of memory under `tensors`."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in inner_tensors(tensors)}
    return sum(found.values())


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Tensors of one element or more in its states."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def residents(one: Trained) -> tuple[Resident, Resident]:
    pool = HostPool()
    of_optimizer = resident_for_optimizer("adamw", one.optimizer, pool)
    return resident_for_model("actor", one.model, pool), of_optimizer


def cycles(one: Trained, alone: Trained) -> None:
    """Before the first forward, then after training steps, each with a forward without gradients at its end."""
    model, optimizer = residents(one)
    objects = list(one.model.parameters())
    for cycle in range(3):
        registered = list(one.model.parameters())
        taken = model.nbytes
        model.release(soon())
        optimizer.release(soon())
        assert taken == model.nbytes
        assert taken
        assert held([*registered, *one.model.parameters(), *one.model.buffers(), *states(one.optimizer)]) == 0
        assert bool(optimizer.nbytes) == (cycle > 0)
        optimizer.restore(soon())
        model.restore(soon())
        assert model.nbytes == taken
        assert unequal(one.full(one.model), alone.full(alone.model)) == []
        for trained in (one, alone):
            trained.step(cycle)
    after = one.full(one.model)  # registers the shards
    assert all(a is b for a, b in zip(objects, one.model.parameters(), strict=True))
    assert unequal(after, alone.full(alone.model)) == []
