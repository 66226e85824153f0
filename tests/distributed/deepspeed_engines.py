"""Tiny transformers models in DeepSpeed engines of every kind, and the full tensors by DeepSpeed's own gather."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.distributed.flat_steps import Trainer
from tests.distributed.sharded_models import llama, moe
from wsync.testing.ranks import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How an engine is set up."""

    stage: int
    dtype: torch.dtype = torch.float32
    model: Callable[[], PreTrainedModel] = llama
    partition_at_birth: bool = True
    """Made under `zero.Init`, else partitioned by `initialize`. ZeRO-3 only."""

    frozen: bool = False
    """Every other layer does not train."""

    zero: dict[str, Any] = field(default_factory=dict)
    """More of DeepSpeed's `zero_optimization`."""

    @property
    def config(self) -> dict[str, Any]:
        """What DeepSpeed reads."""
        precision = {torch.bfloat16: {"bf16": {"enabled": True}}}
        return {
            "train_micro_batch_size_per_gpu": 2,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 40, **self.zero},
            **precision.get(self.dtype, {}),
        }


KINDS: dict[str, Kind] = {
    "zero0": Kind(stage=0),
    "zero1 bf16": Kind(stage=1, dtype=torch.bfloat16),
    "zero2 tied": Kind(stage=2, model=lambda: llama(tied=True)),
    "zero3": Kind(stage=3),
    "zero3 bf16 tied": Kind(stage=3, dtype=torch.bfloat16, model=lambda: llama(tied=True)),
    "zero3 moe nothing persists": Kind(stage=3, model=moe, zero={"stage3_param_persistence_threshold": 0}),
    "zero3 offloaded frozen partitioned by initialize": Kind(
        stage=3, frozen=True, partition_at_birth=False, zero={"offload_param": {"device": "cpu"}}
    ),
    "zero3 all persists": Kind(stage=3, zero={"stage3_param_persistence_threshold": 1 << 20}),
    "zero3 hpz": Kind(stage=3, zero={"zero_hpz_partition_size": 2}),
}


def deepspeed_on(me: Rank) -> Any:
    """DeepSpeed, told where it runs and kept from compiling an extension that gloo does not need."""
    os.environ.update(LOCAL_RANK=str(me.rank), RANK=str(me.rank), WORLD_SIZE=str(me.world_size), DS_ACCELERATOR="cpu")
    deepspeed = import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def trainer(me: Rank, kind: Kind) -> Trainer:
    return Trainer(actor=start(me, kind), step=train_step, full=full_tensors, dtype=kind.dtype)


def start(me: Rank, kind: Kind) -> Any:
    """A `deepspeed.DeepSpeedEngine` of a model from its configuration, with a torch optimizer."""
    deepspeed = deepspeed_on(me)
    template = kind.model()
    early = kind.stage == 3 and kind.partition_at_birth
    torch.manual_seed(7)
    with deepspeed.zero.Init(config_dict_or_path=kind.config) if early else nullcontext():
        model = AutoModelForCausalLM.from_config(template.config)
    with gathered(model, modifier_rank=0), torch.no_grad():
        for parameter in model.parameters():  # made under zero.Init, stacked experts are uninitialised memory
            parameter.copy_(torch.randn(parameter.shape) / 8)
    if kind.frozen:
        for layer in model.model.layers[::2]:
            layer.requires_grad_(False)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(weights, lr=1e-2), config=kind.config)
    return engine


def train_step(engine: Any, seed: int) -> None:
    """One step on a batch that every rank shares, then a forward without gradients, which leaves weights gathered."""
    tokens = torch.randint(0, 60, (2, 8), generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    with torch.no_grad():
        engine(input_ids=tokens)


def full_tensors(engine: Any) -> dict[str, torch.Tensor]:
    """*Collective.* Every checkpoint tensor, gathered by DeepSpeed and named by transformers' own code."""
    from transformers.core_model_loading import revert_weight_conversion

    model: PreTrainedModel = engine.module
    with gathered(model):
        state = {n: t.detach().clone() for n, t in model.state_dict().items() if n not in model.all_tied_weights_keys}
    return {name: tensor.clone() for name, tensor in revert_weight_conversion(model, state).items()}


def gathered(module: nn.Module, modifier_rank: int | None = None) -> Any:
    """DeepSpeed's context in which every parameter of `module` is whole, and may be edited on one rank."""
    zero = import_module("deepspeed").zero
    return zero.GatheredParameters(list(module.parameters()), modifier_rank=modifier_rank)
