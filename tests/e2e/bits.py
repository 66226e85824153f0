"""What workers have after a pull, bit by bit, and how many bytes that must have taken."""

from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open

from tests.e2e.engines import OpenEngine
from tests.e2e.families import build
from tests.e2e.trainers import State
from tests.engines.inside import Seen

_BYTES = 4
"""Of an element: every trainer here has float32, and that is what is read."""

_WHOLE = ("norm.weight", "layernorm.weight", "mlp.gate.weight")
"""Ends of the names of tensors that every worker has whole; of all others each has a part of its own."""

_MERGED = ("q_proj.weight", "v_proj.weight", "o_proj.weight", "down_proj.weight")


def least_bytes(folder: Path, workers: int, travel: Collection[str] = ()) -> int:
    """What `workers` of one engine must read of the checkpoint in `folder`: each its own part, once.

    Tensors whose names end with one of `travel` are not read: the trainer merges adapters into them, say.
    """
    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                times = workers if name.endswith(_WHOLE) else 1
                if not name.endswith(tuple(travel)):
                    total += times * _BYTES * prod(tensors.get_slice(name).get_shape())
    return total


def adapted(trainer: str, family: str) -> Sequence[str]:
    """For `least_bytes`: what the adapters of `tests.e2e.trainers` change."""
    if not trainer.startswith("lora"):
        return ()
    return _MERGED[:-1] if family == "qwen3-moe" else _MERGED


class Bits:
    """Compares an engine's parameters after a sync with those that its own loader makes of the same weights."""

    def __init__(self, engine: OpenEngine | None, family: str, launch: Path) -> None:
        """*Collective.* Nothing was synced yet: the engine is as it started, on the checkpoint in `launch`."""
        self._engine, self._family, self._launch = engine, family, launch
        self._started = self._look()

    def compare(self, state: State, folder: Path) -> dict[str, Any]:
        """*Collective.* `state`: full weights, as the trainer gathers them; `folder` for a checkpoint of them.

        The loader first takes the launch weights again. That shows that it writes every parameter, and does so as a
        fresh engine does.
        """
        synced = self._look()
        if dist.get_rank() == 0:
            save(state, self._family, folder)
        relaunched, loaded = self._loaded(self._launch), self._loaded(folder)
        return {
            "parameters": [len(worker) for worker in synced],
            "differ": _alike(synced, loaded, False),
            "not loaded": _alike(relaunched, loaded, True),
            "not as at the start": _alike(relaunched, self._started, False),
        }

    def _loaded(self, folder: Path) -> list[Seen]:
        dist.barrier()
        if self._engine is not None:
            self._engine.load(folder)
        return self._look()

    def _look(self) -> list[Seen]:
        """Of all workers, in the order of the ranks that own them."""
        mine = self._engine.look() if self._engine is not None else []
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, mine)
        return [worker for workers in everybody for worker in workers]


def save(state: State, family: str, folder: Path) -> None:
    """A checkpoint of these full weights, by transformers."""
    model = build(family, 0)
    model.load_state_dict(state, strict=False)
    model.save_pretrained(folder)


def _alike(one: Sequence[Seen], other: Sequence[Seen], wanted: bool) -> list[str]:
    """Parameters by worker of which bytes and place are the same in both, or are not."""
    return [
        f"{name} of {rank}"
        for rank, (left, right) in enumerate(zip(one, other, strict=True))
        for name in sorted({*left, *right})
        if (left.get(name) == right.get(name)) is wanted
    ]
