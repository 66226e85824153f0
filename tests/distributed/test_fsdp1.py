"""FSDP1 on 2, 3 and 4 real ranks: what is exported, that training does not notice, and what is refused.

One set of ranks goes through all cases of its size; each case is then a test of its own.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from torch.distributed.tensor import DTensor

from tests.distributed.exchange_steps import Case, Outcome, differing, make_group, plan_of, run_cases, sync
from tests.distributed.flat_bags import fsdp1_kit
from tests.distributed.flat_steps import Trainer, into_hugging_face, three_syncs
from tests.distributed.fsdp1_models import LAYOUTS, full_tensors, train_step, wrap
from tests.distributed.sharded_models import llama, tensor_parallel
from wsync.adapters.trainers.fsdp1 import FSDP1Producer
from wsync.errors import MismatchError, UnsupportedError
from wsync.testing.ranks import Rank, run_ranks

ON_FOUR = ["hybrid"]
ON_THREE = ["full", "full flat", "moe"]
QUICK = ["full", "full flat", "grad op", "not sharded flat", "mixed precision", "tied flat", "moe", "frozen", "ignored"]
ON_TWO = [name for name in LAYOUTS if name not in ON_FOUR]


def trainer(name: str) -> Trainer:
    return Trainer(actor=LAYOUTS[name](), step=train_step, full=full_tensors)


def layout(me: Rank, name: str) -> None:
    three_syncs(me, name, trainer(name), trainer(name))


def edit(model: Any, seed: int) -> None:
    """Instead of a training step: new weights by FSDP1's own means, and a forward."""
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * (seed + 1))
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))


def offloaded(me: Rank) -> None:
    """Without an accelerator no memory can be pinned, and no backward runs; a copy stands in for pinned memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        one, other = (
            Trainer(actor=wrap(llama(), cpu_offload=CPUOffload(offload_params=True)), step=edit, full=full_tensors)
            for _ in range(2)
        )
        three_syncs(me, "offloaded", one, other)


def between_forward_and_backward(me: Rank) -> None:
    """SHARD_GRAD_OP then has its parameters unsharded; the shards are exported, and the backward pass goes on."""
    model, alone = LAYOUTS["grad op"](), LAYOUTS["grad op"]()
    producer = FSDP1Producer(model)
    plan = plan_of(producer, torch.float32, 4096)
    producer.prepare(plan, [0], make_group(me, "between"))
    expected = full_tensors(model)

    def between() -> None:
        result = sync(producer, plan, [0], me.rank)
        assert me.rank or differing(result, expected, torch.float32) == []

    train_step(model, 0, between=between)
    train_step(alone, 0)
    assert differing(full_tensors(model), full_tensors(alone), torch.float32) == []


def tokens(me: Rank) -> str:
    return into_hugging_face(me, trainer("full flat"), llama)


def refusal(model: nn.Module) -> str:
    with pytest.raises(UnsupportedError) as caught:
        FSDP1Producer(model).metadata()
    return str(caught.value)


def refusals(me: Rank) -> dict[str, str]:
    """By what is wrong."""
    found = {}
    model: Any = LAYOUTS["full"]()
    with FullyShardedDataParallel.summon_full_params(model):
        found["summoned"] = refusal(model)
    inside: list[str] = []
    hook = model.module.lm_head.register_forward_hook(lambda *_: inside.append(refusal(model)))
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]))
    hook.remove()
    [found["in forward"]] = inside
    parameter = next(parameter for parameter in model.parameters() if parameter.numel())
    parameter.data = parameter.data.clone()
    found["replaced"] = refusal(model)
    transposed: Any = nn.Linear(6, 4)
    transposed.weight = nn.Parameter(torch.randn(6, 4).T)
    found["transposed"] = refusal(FullyShardedDataParallel(transposed, device_id=torch.device("cpu")))
    flat = model._handle.flat_param
    del flat._shard_param_infos
    found["another torch"] = refusal(model)
    return found


def beside_tensor_parallelism(me: Rank) -> str:
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (me.world_size,))
    model = tensor_parallel(llama(), mesh)
    sharded = [
        child for child in model.modules() if any(isinstance(p, DTensor) for p in child.parameters(recurse=False))
    ]
    return refusal(wrap(model, ignored_states=sharded))


def cast_buffers(me: Rank) -> str:
    """Mixed precision casts buffers at the first forward: one that is not sent may change, one that is may not."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    for sent in (False, True):
        model = llama()
        model.register_buffer("extra", torch.randn(3), persistent=sent)
        root = wrap(model, mixed_precision=precision)
        producer = FSDP1Producer(root)
        plan = plan_of(producer, torch.bfloat16, 4096)
        producer.prepare(plan, [0], make_group(me, f"buffer {sent}"))
        train_step(root, 0)
        if not sent:
            result = sync(producer, plan, [0], me.rank)
            expected = full_tensors(root)
            assert me.rank or differing(result, expected, torch.bfloat16) == []
    with pytest.raises(MismatchError) as caught:
        producer.open()
    return str(caught.value)


SPECIAL: tuple[Callable[..., Any], ...] = (
    offloaded,
    between_forward_and_backward,
    tokens,
    refusals,
    beside_tensor_parallelism,
    cast_buffers,
)
KITS = [Case(name=f"kit {orig}", run=fsdp1_kit, args=(orig,)) for orig in (True, False)]


def outcomes(cases: list[Case], world_size: int) -> dict[str, list[Outcome]]:
    by_rank = run_ranks(run_cases, world_size, cases, timeout_s=400)
    return {case.name: [mine[case.name] for mine in by_rank] for case in cases}


def layouts(names: list[str]) -> list[Case]:
    return [Case(name=name, run=layout, args=(name,)) for name in names]


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, list[Outcome]]:
    return outcomes([*layouts(QUICK), *(Case(name=case.__name__, run=case) for case in SPECIAL), *KITS], 2)


@pytest.fixture(scope="module")
def more_on_two_ranks() -> dict[str, list[Outcome]]:
    return outcomes(layouts([name for name in ON_TWO if name not in QUICK]), 2)


def results(found: dict[str, list[Outcome]], name: str) -> list[Any]:
    for rank, outcome in enumerate(found[name]):
        assert not outcome.error, f"rank {rank}: {outcome.error}"
    return [outcome.result for outcome in found[name]]


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks(two_ranks: dict[str, list[Outcome]], name: str) -> None:
    results(two_ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ON_TWO if name not in QUICK])
def test_two_ranks_more(more_on_two_ranks: dict[str, list[Outcome]], name: str) -> None:
    results(more_on_two_ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize(("names", "ranks"), [(ON_THREE, 3), (ON_FOUR, 4)])
def test_more_ranks(names: list[str], ranks: int) -> None:
    found = outcomes(layouts(names), ranks)
    for name in names:
        results(found, name)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_the_producer_kit(two_ranks: dict[str, list[Outcome]], use_orig_params: bool) -> None:
    assert results(two_ranks, f"kit {use_orig_params}") == [4, 4], "flat parameters in the zoo"


def test_offloaded_parameters(two_ranks: dict[str, list[Outcome]]) -> None:
    results(two_ranks, "offloaded")


def test_a_sync_between_forward_and_backward(two_ranks: dict[str, list[Outcome]]) -> None:
    results(two_ranks, "between_forward_and_backward")


def test_tokens_of_an_engine_after_syncs_and_a_failure(two_ranks: dict[str, list[Outcome]]) -> None:
    heard, own = results(two_ranks, "tokens")
    assert heard.startswith("RankError: stopped before phase 'bucket 2': rank 1: MemoryError: no room to pack")
    assert own == "MemoryError: no room to pack bucket 2"


def test_what_cannot_be_exported_is_refused_by_name(two_ranks: dict[str, list[Outcome]]) -> None:
    for found in results(two_ranks, "refusals"):
        assert "are inside summon_full_params" in found["summoned"]
        assert "are in the middle of a forward pass; finish it first" in found["in forward"]
        assert "was given other data since the last forward pass" in found["replaced"]
        assert "weight was not contiguous when FSDP1 flattened it" in found["transposed"]
        assert f"FSDP1 of torch {torch.__version__} keeps no _shard_param_infos" in found["another torch"]


def test_dtensors_beside_flat_parameters_are_refused(two_ranks: dict[str, list[Outcome]]) -> None:
    for words in results(two_ranks, "beside_tensor_parallelism"):
        assert "self_attn.q_proj.weight is a DTensor; use fully_shard (FSDP2) with tensor parallelism" in words


def test_a_buffer_that_mixed_precision_casts_asks_for_another_connect(two_ranks: dict[str, list[Outcome]]) -> None:
    for words in results(two_ranks, "cast_buffers"):
        assert words.startswith("1 tensors of FullyShardedDataParallel are no longer what they were at connect: extra ")
        assert words.endswith("connect again")
