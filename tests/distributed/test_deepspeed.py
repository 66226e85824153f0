"""DeepSpeed engines of every ZeRO stage on 2 and 3 real ranks: what is exported, what is refused, what training sees.

One set of ranks goes through all cases of its size; each case is then a test of its own.
"""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.deepspeed_engines import (
    KINDS,
    Kind,
    deepspeed_on,
    full_tensors,
    gathered,
    start,
    train_step,
    trainer,
)
from tests.distributed.exchange_steps import Case, Outcome, differing, make_group, plan_of, run_cases, sync
from tests.distributed.flat_bags import zero3_kit
from tests.distributed.flat_steps import into_hugging_face, three_syncs
from tests.distributed.sharded_models import llama
from wsync.adapters.trainers.deepspeed import DeepSpeedProducer
from wsync.errors import UnsupportedError
from wsync.registry import find_trainer
from wsync.testing.ranks import Rank, run_ranks

SLOW = ["zero0", "zero2 tied", "zero3", "zero3 all persists", "zero3 hpz"]
QUICK = [name for name in KINDS if name not in SLOW]
ON_THREE = ["zero3", "zero3 bf16 tied", "zero3 moe nothing persists"]


def layout(me: Rank, name: str) -> None:
    synced = trainer(me, KINDS[name])
    # With hpZ, DeepSpeed makes its groups once a process: only one engine.
    three_syncs(me, name, synced, synced if "hpz" in name else trainer(me, KINDS[name]))


def tokens(me: Rank) -> str:
    return into_hugging_face(me, trainer(me, KINDS["zero3 bf16 tied"]), lambda: llama(tied=True))


def without_an_engine(me: Rank) -> None:
    """A module under `zero.Init` that nobody gave to `initialize`, and the module of an engine."""
    deepspeed = deepspeed_on(me)
    with deepspeed.zero.Init(config_dict_or_path=KINDS["zero3"].config):
        alone = llama()
    of_engine = start(me, KINDS["zero3"]).module
    for module in (alone, of_engine):
        assert find_trainer(module) is DeepSpeedProducer
        producer = DeepSpeedProducer(module)
        plan = plan_of(producer, torch.float32, 4096)
        producer.prepare(plan, [0], make_group(me, f"module {module is alone}"))
        result = sync(producer, plan, [0], me.rank)
        expected = full_tensors(SimpleNamespace(module=module))
        assert me.rank or differing(result, expected, torch.float32) == []


def compiled_and_moved(me: Rank) -> None:
    """The engine's own `compile`; then partitions in other memory, as `offload_states` leaves them.

    DeepSpeed's `offload_states` itself wants its FusedAdam, which has to be compiled.
    """
    engine = start(me, KINDS["zero3"])
    engine.compile(backend="eager")
    producer = DeepSpeedProducer(engine)
    plan = plan_of(producer, torch.float32, 4096)
    producer.prepare(plan, [0], make_group(me, "moved"))
    train_step(engine, 0)
    expected = full_tensors(engine)
    for parameter in engine.module.parameters():
        parameter.ds_tensor.data = parameter.ds_tensor.data.clone()
    result = sync(producer, plan, [0], me.rank)
    assert me.rank or differing(result, expected, torch.float32) == []


def refusal(actor: nn.Module) -> str:
    assert find_trainer(actor) is DeepSpeedProducer
    with pytest.raises(UnsupportedError) as caught:
        DeepSpeedProducer(actor).metadata()
    return str(caught.value)


def _nvme() -> Any:
    return import_module("deepspeed.runtime.zero.offload_config").OffloadDeviceEnum.nvme


def states(me: Rank) -> dict[str, str]:
    """ZeRO-3 parameters in states that cannot be exported. Where DeepSpeed has no way to them here, its mark is set."""
    engine = start(me, KINDS["zero3"])
    weight: Any = engine.module.model.embed_tokens.weight
    found = {}
    with gathered(engine.module):
        found["gathered"] = refusal(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight.ds_tensor, "final_location", _nvme())
        found["nvme"] = refusal(engine)
    weight.ds_tensor.ds_quant_scale = torch.ones(1)
    found["quantised"] = refusal(engine)
    del weight.ds_tensor.ds_quant_scale
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(weight, "ds_zero_partition_rank")
        found["another version"] = refusal(engine)
    DeepSpeedProducer(engine).metadata()
    return found


def parallelism(me: Rank) -> dict[str, str]:
    """Engines and modules of which ranks hold different tensors, by what they are."""
    deepspeed = deepspeed_on(me)
    engine = start(me, Kind(stage=1))
    found = {}
    for attribute, value in (("has_moe_layers", True), ("mp_world_size", 2), ("pipeline_parallelism", True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, attribute, value)
            found[attribute] = refusal(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(engine, "mp_world_size")
        found["another version"] = refusal(engine)
    layers = import_module("deepspeed.module_inject.layers")
    group = torch.distributed.new_group(list(range(me.world_size)))
    model = llama()
    model.model.layers[1].mlp.down_proj = layers.LinearAllreduce(nn.Linear(48, 32, bias=False), group)
    found["autotp"] = refusal(model)
    for kind in (deepspeed.InferenceEngine, deepspeed.DeepSpeedHybridEngine):
        wrapper = kind.__new__(kind)
        nn.Module.__init__(wrapper)
        found[kind.__name__] = refusal(wrapper)
    found["pipeline"] = refusal(deepspeed.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=me.world_size))
    return found


def part_of_the_ranks(me: Rank) -> str:
    """Each rank partitions over a group of itself alone."""
    deepspeed = deepspeed_on(me)
    groups = [torch.distributed.new_group([rank]) for rank in range(me.world_size)]
    module = nn.Linear(4, 4)
    deepspeed.zero.Init(module=module, data_parallel_group=groups[me.rank], dtype=torch.float32)
    producer = DeepSpeedProducer(module)
    plan = plan_of(producer, torch.float32, 4096)
    with pytest.raises(UnsupportedError) as caught:
        producer.prepare(plan, [0], make_group(me, "part"))
    return str(caught.value)


SPECIAL: tuple[Callable[..., Any], ...] = (
    zero3_kit,
    tokens,
    without_an_engine,
    compiled_and_moved,
    states,
    parallelism,
    part_of_the_ranks,
)


def outcomes(cases: list[Case], world_size: int) -> dict[str, list[Outcome]]:
    by_rank = run_ranks(run_cases, world_size, cases, timeout_s=500)
    return {case.name: [mine[case.name] for mine in by_rank] for case in cases}


def layouts(names: list[str]) -> list[Case]:
    return [Case(name=name, run=layout, args=(name,)) for name in names]


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, list[Outcome]]:
    return outcomes([*layouts(QUICK), *(Case(name=case.__name__, run=case) for case in SPECIAL)], 2)


def results(found: dict[str, list[Outcome]], name: str) -> list[Any]:
    for rank, outcome in enumerate(found[name]):
        assert not outcome.error, f"rank {rank}: {outcome.error}"
    return [outcome.result for outcome in found[name]]


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks(two_ranks: dict[str, list[Outcome]], name: str) -> None:
    results(two_ranks, name)


@pytest.mark.slow
@pytest.mark.parametrize(("names", "ranks"), [(SLOW, 2), (ON_THREE, 3)])
def test_more(names: list[str], ranks: int) -> None:
    found = outcomes(layouts(names), ranks)
    for name in names:
        results(found, name)


def test_the_producer_kit(two_ranks: dict[str, list[Outcome]]) -> None:
    assert results(two_ranks, "zero3_kit") == [1000, 1000], "all tiny tensors of the kit are partitioned"


def test_tokens_of_an_engine_after_syncs_and_a_failure(two_ranks: dict[str, list[Outcome]]) -> None:
    heard, own = results(two_ranks, "tokens")
    assert heard.startswith("RankError: stopped before phase 'bucket 2': rank 1: MemoryError: no room to pack")
    assert own == "MemoryError: no room to pack bucket 2"


def test_modules_without_an_engine(two_ranks: dict[str, list[Outcome]]) -> None:
    results(two_ranks, "without_an_engine")


def test_a_compiled_engine_whose_partitions_have_moved(two_ranks: dict[str, list[Outcome]]) -> None:
    results(two_ranks, "compiled_and_moved")


def test_states_that_cannot_be_exported_are_refused_by_name(two_ranks: dict[str, list[Outcome]]) -> None:
    for found in results(two_ranks, "states"):
        for words in found.values():
            assert "model.embed_tokens.weight" in words
        assert "is inside deepspeed.zero.GatheredParameters" in found["gathered"]
        assert "is offloaded to NVMe; offload parameters to the CPU instead" in found["nvme"]
        assert "is kept quantised" in found["quantised"]
        assert "does not say ds_zero_partition_rank; wsync was tested with 0.19.8" in found["another version"]


def test_parallelism_that_cannot_be_exported_is_refused_by_name(two_ranks: dict[str, list[Outcome]]) -> None:
    for found in results(two_ranks, "parallelism"):
        assert "with expert parallelism" in found["has_moe_layers"]
        assert "with tensor parallelism" in found["mp_world_size"]
        assert "with pipeline parallelism" in found["pipeline_parallelism"]
        assert "has no mp_world_size; wsync was tested with 0.19.8" in found["another version"]
        assert "model.layers.1.mlp.down_proj (LinearAllreduce) holds slices of DeepSpeed's tensor" in found["autotp"]
        for name in ("InferenceEngine", "DeepSpeedHybridEngine"):
            assert f"{name} cannot be exported. Supported: deepspeed.DeepSpeedEngine" in found[name]
        assert "PipelineModule" in found["pipeline"]


def test_a_partition_over_some_of_the_ranks_is_refused(two_ranks: dict[str, list[Outcome]]) -> None:
    for words in results(two_ranks, "part_of_the_ranks"):
        assert "2 parameters are partitioned over groups of [1] ranks, but 2 trainer ranks take part" in words
