"""PEFT LoRA over flat shards, on real ranks: ZeRO-3 and FSDP1 cut weights and factors in the middle of rows."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.distributed.deepspeed_engines import deepspeed_on
from tests.distributed.exchange_steps import Case, Outcome, make_group, plan_of, run_cases, sync
from tests.distributed.sharded_models import llama, moe
from tests.distributed.test_lora_ranks import causal, expected_of, zoo
from wsync.adapters.trainers.lora import LoRAProducer
from wsync.errors import UnsupportedError
from wsync.registry import find_trainer
from wsync.testing.ranks import Rank, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft.*")


def zero(me: Rank, model: nn.Module, stage: int) -> Any:
    deepspeed = deepspeed_on(me)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained), config=config)
    return engine


def fsdp1(me: Rank, model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))


MODELS: dict[str, Callable[[], Any]] = {
    "zoo": lambda: zoo("modules to save"),
    "stacked": lambda: zoo("stacked parameters"),
    "llama": lambda: causal(llama),
    "tied": lambda: causal(lambda: llama(tied=True)),
    "moe": lambda: causal(moe),
}

SHARDINGS: dict[str, Callable[[Rank, nn.Module], Any]] = {
    "zero2": lambda me, model: zero(me, model, 2),
    "zero3": lambda me, model: zero(me, model, 3),
    "fsdp1": fsdp1,
}


def check_syncs(me: Rank, sharding: str, name: str) -> None:
    model = MODELS[name]()
    expected = expected_of(copy.deepcopy(model))
    actor = SHARDINGS[sharding](me, model)
    assert find_trainer(actor) is LoRAProducer
    producer, group = LoRAProducer(actor), make_group(me, f"{sharding} {name}")
    plan = plan_of(producer, torch.float32, 2048)
    producer.prepare(plan, [0, 1], group)
    for _ in range(3):
        for key, tensor in sync(producer, plan, [0, 1], me.rank).items():
            torch.testing.assert_close(tensor, expected[key], rtol=2e-6, atol=2e-6)
    group.close()


def check_dora(me: Rank, sharding: str, name: str) -> None:
    with pytest.raises(UnsupportedError, match="has DoRA, and this rank's part of it ends within"):
        LoRAProducer(SHARDINGS[sharding](me, zoo("dora"))).metadata()


QUICK = {"zero2": ["llama"], "zero3": ["zoo", "llama", "moe"], "fsdp1": ["stacked", "tied"]}

CASES = [
    *(Case(name=f"{s} {m}", run=check_syncs, args=(s, m)) for s, models in QUICK.items() for m in models),
    Case(name="dora", run=check_dora, args=("zero3", "dora")),
]


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    found: list[dict[str, Outcome]] = run_ranks(run_cases, 2, CASES, timeout_s=240)
    return found


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_two_ranks(outcomes: list[dict[str, Outcome]], name: str) -> None:
    assert [mine[name].error for mine in outcomes] == ["", ""]
