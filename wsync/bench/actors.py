"""Trainers of every kind over the same weights, and how peers take full tensors out of each of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from wsync.bench.cases import Shapes
from wsync.bench.weights import ACTOR_SEED, random_module, random_tensors
from wsync.extras import importing
from wsync.testing.launched import as_under_torchrun
from wsync.testing.ranks import Rank

PRODUCERS = ("module", "fsdp2", "fsdp1", "zero3", "checkpoint")

Pairs = Iterator[tuple[str, torch.Tensor]]


@dataclass(slots=True, kw_only=True)
class Trained:
    """Weights in training, on this rank."""

    kind: str
    """One of `PRODUCERS`."""

    actor: Any
    """What `wsync.connect` takes."""

    def full_tensors(self, dtype: torch.dtype, *, cast_first: bool = False) -> Pairs:
        """*Collective, lazy.* Each tensor in full and in `dtype`, one after the other, as trainers export them.

        `cast_first`: cast the shard and gather that; FSDP2 only.
        """
        yield from ((name, tensor.detach().to(dtype)) for name, tensor in self._gathered(dtype if cast_first else None))

    def _gathered(self, before: torch.dtype | None) -> Pairs:
        if self.kind == "checkpoint":
            yield from _from_files(Path(self.actor))
        elif self.kind == "fsdp2":
            for name, parameter in self.actor.named_parameters():
                yield name, (parameter if before is None else parameter.to(before)).full_tensor()
        elif self.kind == "zero3":
            zero = import_module("deepspeed").zero
            for name, parameter in self.actor.module.named_parameters():
                with zero.GatheredParameters([parameter]):
                    yield name, parameter
        elif self.kind == "fsdp1":
            with type(self.actor).summon_full_params(self.actor, writeback=False):
                for name, parameter in self.actor.named_parameters():
                    yield name.replace("_fsdp_wrapped_module.", ""), parameter
        else:
            yield from self.actor.named_parameters()


def start(kind: str, me: Rank, shapes: Shapes, dtype: torch.dtype, folder: Path) -> Trained:
    """*Collective.* Weights of `ACTOR_SEED`, held as `kind` holds them. Raises `UnsupportedError` without its library.

    `folder`: empty, for checkpoints.
    """
    if kind == "checkpoint":
        if me.rank == 0:
            from safetensors.torch import save_file

            save_file(dict(random_tensors(shapes, ACTOR_SEED, dtype)), folder / "model.safetensors")
        dist.barrier()
        return Trained(kind=kind, actor=str(folder))
    module = random_module(shapes, ACTOR_SEED, dtype)
    return Trained(kind=kind, actor=_WRAPS[kind](module, me))


def _module(module: nn.Module, me: Rank) -> nn.Module:
    return module


def _fsdp2(module: nn.Module, me: Rank) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return cast("nn.Module", fully_shard(module))


def _fsdp1(module: nn.Module, me: Rank) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def _zero3(module: nn.Module, me: Rank) -> Any:
    as_under_torchrun(me, DS_ACCELERATOR="cpu")
    with importing("deepspeed", "the zero3 producer"):
        deepspeed = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles an extension that gloo needs not
    dtype = next(module.parameters()).dtype
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype is torch.bfloat16},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    return engine


_WRAPS = {"module": _module, "fsdp2": _fsdp2, "fsdp1": _fsdp1, "zero3": _zero3}


def _from_files(folder: Path) -> Pairs:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_tensor(name)
