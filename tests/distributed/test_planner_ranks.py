"""What the planner says a rank holds, beside what sharded modules and their optimizers really hold."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed.deepspeed_engines import Kind, start, train_step
from tests.distributed.fsdp1_models import wrap
from tests.distributed.sharded_models import llama, moe, shard
from wsync.bench.cases import numel_of
from wsync.planner.hf_config import model_of
from wsync.planner.model import Model
from wsync.planner.trainer_side import local_numel
from wsync.testing.ranks import Rank, run_ranks

pytestmark = pytest.mark.slow

MODELS = {"dense": llama, "moe": moe}
RANKS = 3


def planned(name: str) -> Model:
    return model_of(name, MODELS[name]().config.to_dict())


def held_under_fsdp(me: Rank) -> Mapping[str, Mapping[str, int]]:
    """Elements of parameters in the memory of this rank, by trainer and model."""
    return {
        "fsdp2": {
            name: sum(p.to_local().numel() for p in shard(make()).parameters() if isinstance(p, DTensor))
            for name, make in MODELS.items()
        },
        "fsdp1": {
            name: sum(p.numel() for p in wrap(make(), use_orig_params=False).parameters())
            for name, make in MODELS.items()
        },
    }


def test_the_fullest_rank_under_fsdp() -> None:
    held = run_ranks(held_under_fsdp, RANKS, timeout_s=240)
    for trainer in ("fsdp1", "fsdp2"):
        for name in MODELS:
            found = max(rank[trainer][name] for rank in held)
            assert found == local_numel(planned(name).trained_shapes, trainer, RANKS)


def held_under_zero(me: Rank) -> Mapping[str, int]:
    """Elements of parameters under ZeRO-3 by model; of gradients, master copy and states under ZeRO-2 and ZeRO-3."""
    found = {}
    persists = {"stage3_param_persistence_threshold": 0}
    for name, make in MODELS.items():
        engine: Any = start(me, Kind(stage=3, model=make, partition_at_birth=False, zero=persists))
        found[name] = sum(parameter.ds_tensor.numel() for parameter in engine.module.parameters())
        if name == "dense":
            found["zero3 gradients"] = engine.optimizer.grad_partitions_flat_buffer.numel()
            found["zero3 master"] = float32s(engine.optimizer.fp32_partitioned_groups_flat)
    engine = start(me, Kind(stage=2, dtype=torch.bfloat16))
    train_step(engine, 3)
    found["zero2 master"] = float32s(engine.optimizer.single_partition_of_fp32_groups)
    states = engine.optimizer.optimizer.state.values()
    found["zero2 states"] = float32s([value for state in states for value in state.values() if value.dim()])
    return found


def float32s(tensors: list[torch.Tensor]) -> int:
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    return sum(tensor.numel() for tensor in tensors)


def test_the_fullest_rank_under_deepspeed() -> None:
    held = run_ranks(held_under_zero, RANKS, timeout_s=240)
    shapes = planned("dense").trained_shapes
    share = -(-numel_of(shapes) // RANKS)
    for rank in held:
        assert rank["dense"] == rank["zero3 gradients"] == rank["zero3 master"] == local_numel(shapes, "zero3", RANKS)
        assert rank["moe"] == local_numel(planned("moe").trained_shapes, "zero3", RANKS)
        assert share <= rank["zero2 master"] <= share + 4  # rounded up to pairs on every rank
        assert rank["zero2 states"] == 2 * rank["zero2 master"]
