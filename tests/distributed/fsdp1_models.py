"""Tiny transformers models under FSDP1 in every way, and the full tensors by FSDP1's own gather."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import PreTrainedModel

from tests.distributed.sharded_models import checkpointed, compiled, llama, moe

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def wrap(model: PreTrainedModel, **options: Any) -> FullyShardedDataParallel:
    """Every layer, then the root."""
    return FullyShardedDataParallel(
        checkpointed(model) if options.pop("checkpoint", False) else model,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        device_id=torch.device("cpu"),
        **{"use_orig_params": True, **options},
    )


def half_frozen() -> FullyShardedDataParallel:
    model = llama()
    model.model.layers[0].requires_grad_(False)
    model.model.norm.requires_grad_(False)
    return wrap(model)


def partly_ignored() -> FullyShardedDataParallel:
    model = llama()
    model.register_buffer("steps", torch.tensor(12))
    return wrap(model, ignored_states=[model.model.layers[1].mlp])


def hybrid() -> FullyShardedDataParallel:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return wrap(llama(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def strategy(name: ShardingStrategy, orig: bool) -> Callable[[], nn.Module]:
    return lambda: wrap(llama(), sharding_strategy=name, use_orig_params=orig)


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "full": lambda: wrap(llama()),
    "full flat": lambda: wrap(llama(), use_orig_params=False),
    "grad op": strategy(ShardingStrategy.SHARD_GRAD_OP, True),
    "grad op flat": strategy(ShardingStrategy.SHARD_GRAD_OP, False),
    "not sharded": strategy(ShardingStrategy.NO_SHARD, True),
    "not sharded flat": strategy(ShardingStrategy.NO_SHARD, False),
    "mixed precision": lambda: wrap(llama(), mixed_precision=BF16),
    "mixed precision not sharded": lambda: wrap(
        llama(), mixed_precision=BF16, sharding_strategy=ShardingStrategy.NO_SHARD
    ),
    "mixed precision flat grad op": lambda: wrap(
        llama(), mixed_precision=BF16, use_orig_params=False, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    ),
    "tied": lambda: wrap(llama(tied=True)),
    "tied flat": lambda: wrap(llama(tied=True), use_orig_params=False),
    "moe": lambda: wrap(moe()),
    "frozen": half_frozen,
    "ignored": partly_ignored,
    "checkpointed compiled": lambda: compiled(wrap(llama(), checkpoint=True)),
    "hybrid": hybrid,
}


def train_step(model: Any, seed: int, *, between: Callable[[], None] = lambda: None) -> None:
    """One step on a batch that every rank shares, then a forward without gradients, which leaves the root unsharded."""
    model = getattr(model, "_orig_mod", model)  # compiling takes longer than everything else here
    tokens = torch.randint(0, 60, (2, 8), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = model(input_ids=tokens, labels=tokens).loss
    between()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(input_ids=tokens)


def full_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """*Collective.* Every checkpoint tensor, gathered by FSDP1 and named by transformers' own code."""
    from transformers.core_model_loading import revert_weight_conversion

    root: Any = getattr(model, "_orig_mod", model)
    inner = root.module
    with FullyShardedDataParallel.state_dict_type(root, StateDictType.FULL_STATE_DICT):
        state = root.state_dict()
    kept = {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in state.items()}
    kept = {name: tensor.detach() for name, tensor in kept.items() if name not in inner.all_tied_weights_keys}
    return {name: tensor.clone() for name, tensor in revert_weight_conversion(inner, kept).items()}
