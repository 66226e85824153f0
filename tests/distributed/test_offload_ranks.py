"""Sharded models and their optimizers that leave memory and come back, on 2 real ranks.

One set of ranks goes through all cases of a framework; each case is then a test of its own.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffload

from tests.distributed import fsdp1_models, sharded_models
from tests.distributed.deepspeed_engines import KINDS, Kind, full_tensors, start, train_step
from tests.distributed.exchange_steps import Case, Outcome, run_cases
from tests.distributed.flat_steps import unequal
from tests.distributed.offload_steps import Trained, cycles, held, soon
from tests.distributed.sharded_models import llama
from wsync.errors import AdmissionError, MemoryStateError, UnsupportedError
from wsync.memory.host_pool import HostPool
from wsync.memory.residents import resident_for_model, resident_for_optimizer
from wsync.testing.ranks import Rank, run_ranks

FSDP2 = ["fsdp2", "fsdp2 kept unsharded", "fsdp2 tied", "fsdp2 mixed precision", "fsdp2 checkpointed compiled", "tp"]
FSDP1 = [
    "full",
    "full flat",
    "grad op",
    "not sharded flat",
    "mixed precision",
    "mixed precision not sharded",
    "tied flat",
    "ignored",
]
DEEPSPEED = ["zero1 bf16", "zero2 tied", "zero3", "zero3 bf16 tied"]


def fsdp2(me: Rank, name: str) -> None:
    one, alone = (Trained.of(sharded_models.LAYOUTS[name](), sharded_models.full_tensors) for _ in range(2))
    cycles(one, alone)


def fsdp1(me: Rank, name: str) -> None:
    one, alone = (Trained.of(fsdp1_models.LAYOUTS[name](), fsdp1_models.full_tensors) for _ in range(2))
    cycles(one, alone)


def in_a_forward(me: Rank, make: Callable[[], Any]) -> str:
    """What a release says in the middle of a forward pass."""
    model = make()
    resident = resident_for_model("actor", model, HostPool())
    found: list[str] = []

    def release(*_: object) -> None:
        with pytest.raises(MemoryStateError) as caught:
            resident.release(soon())
        found.append(str(caught.value))

    inner = getattr(model, "module", model)
    hook = inner.lm_head.register_forward_hook(release)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]))
    hook.remove()
    resident.release(soon())
    resident.restore(soon())
    [words] = found
    return words


def forward_of_fsdp2(me: Rank) -> str:
    return in_a_forward(me, sharded_models.LAYOUTS["fsdp2"])


def forward_of_fsdp1(me: Rank) -> str:
    return in_a_forward(me, fsdp1_models.LAYOUTS["full"])


def refusal(model: Any) -> str:
    resident = resident_for_model("actor", model, HostPool())
    with pytest.raises(UnsupportedError) as caught:
        resident.check_release()
    return str(caught.value)


def offloaded_by_fsdp(me: Rank) -> list[str]:
    two = refusal(sharded_models.LAYOUTS["fsdp2 offloaded"]())
    with pytest.MonkeyPatch.context() as patch:
        # Without an accelerator no memory can be pinned.
        patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        one = refusal(fsdp1_models.wrap(llama(), cpu_offload=CPUOffload(offload_params=True)))
    return [one, two]


def zero(me: Rank, name: str) -> None:
    """The model and the optimizer of an engine leave and come back one by one, in every order."""
    engine, alone = start(me, KINDS[name]), start(me, KINDS[name])
    fused = torch.optim.AdamW  # stands in for DeepSpeed's own, which has to be compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.ops.adam.fused_adam.FusedAdam", fused)
        pool = HostPool()
        model = resident_for_model("actor", engine, pool)
        optimizer = resident_for_optimizer("adamw", engine, pool)
        objects = list(engine.module.parameters())
        for cycle, (first, second) in enumerate([(model, optimizer), (optimizer, model), (model, optimizer)]):
            taken = first.nbytes
            first.release(soon())
            second.release(soon())
            assert {state.value for state in engine.optimizer.offloaded_states} >= {"lp_params", "hp_params"}
            assert first.nbytes == taken
            assert taken
            first.restore(soon())
            assert not second.present
            assert engine.optimizer.offloaded_states, "DeepSpeed brought back all that was away"
            second.restore(soon())
            assert engine.optimizer.offloaded_states == set()
            assert unequal(full_tensors(engine), full_tensors(alone)) == []
            for trained in (engine, alone):
                train_step(trained, cycle)
    assert unequal(full_tensors(engine), full_tensors(alone)) == []
    assert all(a is b for a, b in zip(objects, engine.module.parameters(), strict=True))


def buffers_of_zero3(me: Rank) -> None:
    """What was the flat buffer of the partitions is not held by anybody while the model is away."""
    engine = start(me, KINDS["zero3"])
    resident = resident_for_model("actor", engine, HostPool())
    buffer = engine.optimizer.lp_param_buffer
    storage = buffer.untyped_storage()._cdata
    partitions = [parameter.ds_tensor for parameter in engine.module.parameters()]
    assert {partition.untyped_storage()._cdata for partition in partitions} == {storage}
    buckets = [bucket.buffer for bucket in engine.optimizer.ipg_buckets.values()]
    gradients = [engine.optimizer.grad_partitions_flat_buffer, *(bucket for bucket in buckets if bucket is not None)]
    assert resident.nbytes == held([buffer, *gradients])
    resident.release(soon())
    assert storage not in {partition.untyped_storage()._cdata for partition in partitions}
    resident.restore(soon())


def pairs_of_zero(me: Rank) -> list[str]:
    engine = start(me, KINDS["zero2 tied"])
    resident = resident_for_model("actor", engine, HostPool())
    said = []

    def refused(call: Callable[[], None]) -> None:
        with pytest.raises(MemoryStateError) as caught:
            call()
        said.append(str(caught.value))

    refused(resident.check_restore)
    resident.release(soon())
    refused(lambda: resident.release(soon()))
    engine.reload_states()
    refused(lambda: resident.restore(soon()))
    engine.offload_states(pin_memory=False)
    resident.restore(soon())
    assert resident.present
    refused(lambda: resident_for_optimizer("adamw", engine, HostPool()).release(soon()))
    engine.reload_states()
    return said


def breaking_zero(me: Rank) -> None:
    """DeepSpeed fails on the way, there and back."""
    engine, alone = start(me, KINDS["zero2 tied"]), start(me, KINDS["zero2 tied"])
    resident = resident_for_model("actor", engine, HostPool())
    zero, healthy = engine.optimizer, type(engine.optimizer)

    def half(call: str, **kept: Any) -> Callable[..., None]:
        def broken(**options: Any) -> None:
            getattr(healthy, call)(zero, **{**options, **kept})
            raise OSError("injected")

        return broken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero, "offload_states", half("offload_states"))
        with pytest.raises(OSError, match="injected"):
            resident.release(soon())
    assert resident.present
    assert zero.offloaded_states == set()
    resident.release(soon())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero, "reload_states", half("reload_states"))
        with pytest.raises(OSError, match="injected"):
            resident.restore(soon())
    assert not resident.present
    assert {state.value for state in zero.offloaded_states} == {"lp_params", "lp_grads"}
    resident.restore(soon())
    for trained in (engine, alone):
        train_step(trained, 0)
    assert unequal(full_tensors(engine), full_tensors(alone)) == []


def refusals_of_zero(me: Rank) -> dict[str, str]:
    found = {}

    def refused(key: str, call: Callable[[], Any], kind: type[Exception] = UnsupportedError) -> None:
        with pytest.raises(kind) as caught:
            call()
        found[key] = str(caught.value)

    def model(engine: Any, pool: HostPool | None = None) -> Any:
        return resident_for_model("actor", engine, pool or HostPool())

    def optimizer(engine: Any) -> Any:
        return resident_for_optimizer("adamw", engine, HostPool())

    zero3 = start(me, KINDS["zero3"])
    refused("not fused", optimizer(zero3).check_release)
    refused("module", lambda: model(zero3.module))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(zero3.optimizer, "lp_param_buffer")
        refused("no buffer", model(zero3).check_release)
    refused("optimizer", lambda: optimizer(zero3.optimizer))
    refused("budget", model(zero3, HostPool(100)).check_release, AdmissionError)
    zero3.backward(zero3(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss)
    refused("gradients", model(zero3).check_release, MemoryStateError)
    zero3.step()
    model(zero3).check_release()
    refused("stage 0", lambda: model(start(me, KINDS["zero0"])))
    refused("params", model(start(me, KINDS["zero3 offloaded frozen partitioned by initialize"])).check_release)
    zero2 = start(me, Kind(stage=2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero2, "zero_use_cpu_optimizer", lambda: True)  # DeepSpeed would compile its CPU optimizer
        refused("states", optimizer(zero2).check_release)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(type(zero2.optimizer), "reload_states")
        refused("another version", lambda: model(zero2))
    return found


def cases(world: list[Case]) -> dict[str, list[Outcome]]:
    by_rank = run_ranks(run_cases, 2, world, timeout_s=400)
    return {case.name: [mine[case.name] for mine in by_rank] for case in world}


@pytest.fixture(scope="module")
def torch_ranks() -> dict[str, list[Outcome]]:
    named = [Case(name=name, run=fsdp2, args=(name,)) for name in FSDP2]
    named += [Case(name=name, run=fsdp1, args=(name,)) for name in FSDP1]
    special = (forward_of_fsdp2, forward_of_fsdp1, offloaded_by_fsdp)
    return cases([*named, *(Case(name=case.__name__, run=case) for case in special)])


@pytest.fixture(scope="module")
def deepspeed_ranks() -> dict[str, list[Outcome]]:
    named = [Case(name=name, run=zero, args=(name,)) for name in DEEPSPEED]
    special = (buffers_of_zero3, pairs_of_zero, breaking_zero, refusals_of_zero)
    return cases([*named, *(Case(name=case.__name__, run=case) for case in special)])


def results(found: dict[str, list[Outcome]], name: str) -> list[Any]:
    for rank, outcome in enumerate(found[name]):
        assert not outcome.error, f"rank {rank}: {outcome.error}"
    return [outcome.result for outcome in found[name]]


@pytest.mark.parametrize("name", [*FSDP2, *FSDP1])
def test_training_goes_on_as_if_nothing_had_happened(torch_ranks: dict[str, list[Outcome]], name: str) -> None:
    results(torch_ranks, name)


@pytest.mark.parametrize("name", ["forward_of_fsdp2", "forward_of_fsdp1"])
def test_nothing_leaves_in_the_middle_of_a_pass(torch_ranks: dict[str, list[Outcome]], name: str) -> None:
    for words in results(torch_ranks, name):
        assert words.startswith("actor is in the middle of ")


def test_what_fsdp_keeps_on_the_host_is_refused(torch_ranks: dict[str, list[Outcome]]) -> None:
    for one, two in results(torch_ranks, "offloaded_by_fsdp"):
        assert (
            "actor was wrapped with CPUOffload(offload_params=True): its parameters are in host memory already" in one
        )
        assert "actor was sharded with a CPUOffloadPolicy: its parameters are in host memory already" in two


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed(deepspeed_ranks: dict[str, list[Outcome]], name: str) -> None:
    results(deepspeed_ranks, name)


@pytest.mark.parametrize("name", ["buffers_of_zero3", "breaking_zero"])
def test_memory_and_failures_of_deepspeed(deepspeed_ranks: dict[str, list[Outcome]], name: str) -> None:
    results(deepspeed_ranks, name)


def test_calls_of_deepspeed_come_in_pairs(deepspeed_ranks: dict[str, list[Outcome]]) -> None:
    for present, away, back, moved in results(deepspeed_ranks, "pairs_of_zero"):
        assert present == "actor is present; release it before it is restored"
        assert away == "actor is away already; restore it before it is released again"
        assert back.startswith("lp_grads, lp_params of actor came back by reload_states() of the engine")
        assert moved.startswith("hp_params, optim_states of adamw were moved by offload_states() of the engine")


def test_what_deepspeed_does_not_move_is_refused_by_name(deepspeed_ranks: dict[str, list[Outcome]]) -> None:
    for found in results(deepspeed_ranks, "refusals_of_zero"):
        assert "at ZeRO stage 3 DeepSpeed 0.19.8 moves the states of its own FusedAdam only" in found["not fused"]
        assert "pass the engine that deepspeed.initialize returned" in found["module"]
        assert "pass the engine that deepspeed.initialize returned" in found["optimizer"]
        assert "has no lp_param_buffer for actor; wsync was tested with 0.19.8" in found["no buffer"]
        assert "the budget is 100 B" in found["budget"]
        assert "actor has gradients of a step that was not made" in found["gradients"]
        assert "of ZeRO stage 0, which moves nothing by itself" in found["stage 0"]
        assert "actor has its parameters in host memory already (offload_param)" in found["params"]
        assert "adamw is in host memory already (offload_optimizer)" in found["states"]
        assert "without DeepSpeedZeroOptimizer.reload_states" in found["another version"]
