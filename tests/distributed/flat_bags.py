"""Arbitrary tensors in modules whose parameters are kept as runs of flattened tensors, for the producer kit."""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.distributed.deepspeed_engines import deepspeed_on
from wsync.adapters.trainers.deepspeed import DeepSpeedProducer
from wsync.adapters.trainers.fsdp1 import FSDP1Producer
from wsync.group import Group
from wsync.protocols import Producer
from wsync.testing.producer_conformance import PRODUCER_CHECKS, ProducerBench
from wsync.testing.ranks import Rank

Tensors = Mapping[str, torch.Tensor]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Bag(nn.Module):
    """Contiguous tensors that `takes` agrees to as parameters, all others as buffers."""

    def __init__(self, tensors: Tensors, takes: Callable[[nn.Module, torch.Tensor], bool]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            owner: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if tensor.is_contiguous() and takes(owner, tensor):
                owner.register_parameter(leaf, nn.Parameter(tensor.clone(), requires_grad=False))
            else:
                owner.register_buffer(leaf, tensor.clone())

    def set(self, tensors: Tensors) -> None:
        """New values for whatever is whole at the moment."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            wanted = tensors[name.replace("_fsdp_wrapped_module.", "")]
            if tensor.shape == wanted.shape:
                tensor.data.copy_(wanted)


_bags: dict[int, Bag] = {}


def make_zero3(tensors: Tensors) -> Producer:
    bag = Bag(tensors, lambda _, tensor: tensor.dim() > 0 and tensor.numel() > 0)
    import_module("deepspeed").zero.Init(module=bag, dtype=torch.float32)
    producer = DeepSpeedProducer(bag)
    _bags[id(producer)] = bag
    return producer


def change_zero3(producer: Producer, tensors: Tensors) -> None:
    """DeepSpeed's own partitioning, without its gather, which gloo has for some dtypes only."""
    available = import_module("deepspeed").runtime.zero.partition_parameters.ZeroParamStatus.AVAILABLE
    bag = _bags[id(producer)]
    for name, parameter in bag.named_parameters():
        if hasattr(parameter, "ds_id"):
            zero: Any = parameter
            zero.data, zero.ds_status = tensors[name].clone(), available
            zero.partition(has_been_updated=True)
    bag.set(tensors)


def zero3_kit(me: Rank) -> int:
    """How many tensors of the kit's zoo were partitioned."""
    deepspeed_on(me)
    run_kit(me, "zero3", make_zero3, change_zero3)
    return max(sum(hasattr(p, "ds_id") for p in bag.parameters()) for bag in _bags.values())


def same_float(owner: nn.Module, tensor: torch.Tensor) -> bool:
    """What one flat parameter can take: floating-point tensors of one dtype."""
    own = {parameter.dtype for parameter in owner.parameters(recurse=False)}
    return tensor.dim() > 0 and tensor.dtype in FLOATS and own <= {tensor.dtype}


def make_fsdp1(tensors: Tensors, use_orig_params: bool) -> Producer:
    bag = Bag(tensors, same_float)
    for name, child in list(bag.named_children()):
        if any(True for _ in child.parameters()):
            bag.add_module(name, wrap(child, use_orig_params))
    root: nn.Module = wrap(bag, use_orig_params)
    producer = FSDP1Producer(root)
    _roots[id(producer)] = root
    return producer


_roots: dict[int, nn.Module] = {}


def wrap(module: nn.Module, use_orig_params: bool) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=use_orig_params)


def change_fsdp1(producer: Producer, tensors: Tensors) -> None:
    root = _roots[id(producer)]
    with FullyShardedDataParallel.summon_full_params(root), torch.no_grad():
        bag = next(child for child in root.modules() if isinstance(child, Bag))
        bag.set(tensors)


def fsdp1_kit(me: Rank, use_orig_params: bool) -> int:
    """How many flat parameters there were at most."""
    os.environ["LOCAL_RANK"] = str(me.rank)
    run_kit(me, f"fsdp1 {use_orig_params}", lambda tensors: make_fsdp1(tensors, use_orig_params), change_fsdp1)
    return max(sum(1 for m in root.modules() if getattr(m, "_handle", None)) for root in _roots.values())


def run_kit(
    me: Rank, name: str, make: Callable[[Tensors], Producer], change: Callable[[Producer, Tensors], None]
) -> None:
    for check in PRODUCER_CHECKS:
        group = Group(me.rank, me.world_size, PrefixStore(f"{name}/{check.__name__}", me.store), 30.0)
        check(ProducerBench(make=make, change=change, group=group))
        group.close()
