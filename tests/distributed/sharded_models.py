"""Tiny transformers models under every layout that trainers use, and the full tensors that they should export."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 67


def llama(*, tied: bool = False, vocabulary: int = VOCABULARY, intermediate: int = 48) -> PreTrainedModel:
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=intermediate,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )


def moe() -> PreTrainedModel:
    torch.manual_seed(7)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=6,
            num_experts_per_tok=2,
        )
    )


def shard(model: PreTrainedModel, **options: Any) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, **options)
    module: nn.Module = model
    fully_shard(module, **options)
    return module


def move_shards(model: nn.Module) -> None:
    """Give every shard of FSDP2 memory elsewhere, as an optimizer or a checkpoint may."""
    for parameter in model.parameters():
        local: Any = parameter
        local._local_tensor = local._local_tensor.clone()


def tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    for layer in model.model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(),
            },
        )
    return model


def fsdp_over_tp(model: PreTrainedModel) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return shard(tensor_parallel(model, mesh["tp"]), mesh=mesh["dp"])


def checkpointed(model: PreTrainedModel) -> nn.Module:
    layer = type(model.model.layers[0])
    module: nn.Module = model
    apply_activation_checkpointing(module, check_fn=lambda child: isinstance(child, layer))
    return module


def compiled(model: nn.Module) -> nn.Module:
    wrapper = torch.compile(model, backend="eager")
    assert isinstance(wrapper, nn.Module)
    return wrapper


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "ddp": lambda: DistributedDataParallel(llama()),
    "fsdp2": lambda: shard(llama()),
    "fsdp2 kept unsharded": lambda: shard(llama(), reshard_after_forward=False),
    "fsdp2 tied": lambda: shard(llama(tied=True)),
    "fsdp2 dim 1": lambda: shard(
        llama(vocabulary=64), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else Shard(0)
    ),
    "fsdp2 mixed precision": lambda: shard(llama(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fsdp2 offloaded": lambda: shard(llama(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp2 checkpointed compiled": lambda: compiled(shard(checkpointed(llama()))),
    "fsdp2 moe": lambda: shard(moe()),
    "fsdp2 moe dim 1": lambda: shard(moe(), shard_placement_fn=lambda p: Shard(1) if p.ndim == 3 else Shard(0)),
    "tp": lambda: tensor_parallel(llama(), init_device_mesh("cpu", (dist.get_world_size(),))),
    "hsdp": lambda: shard(llama(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))),
    "fsdp2 over tp": lambda: fsdp_over_tp(llama()),
    "fsdp2 over tp uneven": lambda: fsdp_over_tp(llama(intermediate=50)),
}


def train_step(model: nn.Module, seed: int) -> None:
    """One step on a batch that every rank shares, then a forward without gradients, which leaves the root unsharded."""
    model = getattr(model, "_orig_mod", model)  # compiling takes longer than everything else here
    tokens = torch.randint(0, 60, (2, 8), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(input_ids=tokens)


def full_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every checkpoint tensor in full, gathered on the trainer's own groups and named by transformers' own code."""
    from transformers.core_model_loading import revert_weight_conversion

    inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", model)
    assert isinstance(inner, PreTrainedModel)
    for child in inner.modules():
        if isinstance(child, FSDPModule):
            child.reshard()
    state = {}
    for name, tensor in inner.state_dict().items():
        if name not in inner.all_tied_weights_keys:
            state[name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return {name: tensor.detach().clone() for name, tensor in revert_weight_conversion(inner, state).items()}
