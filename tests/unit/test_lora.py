"""Weights under PEFT LoRA come out as PEFT's own merge has them, and the base weights are never touched."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model, inject_adapter_in_model
from torch import nn

from tests.unit.lora_models import MERGEABLE, Zoo, config, merged, randomised
from wsync.adapters.trainers.lora import LoRAProducer
from wsync.adapters.trainers.lora_adapter import AdapterProducer
from wsync.adapters.trainers.module import ModuleProducer
from wsync.digest import digest, word_bytes
from wsync.errors import MismatchError, UnsupportedError
from wsync.group import Group
from wsync.plan import Plan
from wsync.protocols import Producer
from wsync.registry import find_trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft.*")


def prepared(module: nn.Module, dtype: torch.dtype | None = None, limit: int = 512) -> tuple[Producer, Plan]:
    """Small buckets: most weights are cut into chunks."""
    producer = LoRAProducer(module)
    specs = [replace(s, dtype=dtype or s.dtype) for s in producer.metadata()]
    plan = Plan.pack([replace(spec, word_bytes=word_bytes(spec)) for spec in specs], limit)
    producer.prepare(plan, [0], Group(0, 1, None, 5.0))
    return producer, plan


def synced(producer: Producer, plan: Plan) -> dict[str, torch.Tensor]:
    """What one sync brings, by name."""
    flat = {spec.name: torch.empty(spec.nbytes, dtype=torch.uint8) for spec in plan.specs}
    producer.open()
    for bucket in plan.buckets:
        slot = torch.full((bucket.nbytes,), 0xA5, dtype=torch.uint8)
        producer.stage(bucket, slot)
        producer.fill(bucket, slot)
        for meta in bucket.tensors:
            flat[meta.name][meta.chunk_offset :][: meta.chunk_nbytes] = slot[meta.offset :][: meta.chunk_nbytes]
    producer.close()
    return {spec.name: flat[spec.name].view(spec.dtype).view(spec.shape) for spec in plan.specs}


def snapshot(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("name", MERGEABLE)
def test_float32_is_what_peft_merges(name: str) -> None:
    model = randomised(MERGEABLE[name](), 1)
    before, expected = snapshot(model), merged(model)
    found = synced(*prepared(model))
    assert list(found) == list(expected)
    # Convolutions are multiplied as matrices here and convolved there, DoRA divides in another order.
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=2e-6, atol=2e-6)
    exact = [key for key in ("dense.weight", "table.weight", "gpt.weight") if torch.equal(found[key], expected[key])]
    assert len(exact) == 3 or "dora" in name
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["plain", "two adapters", "dora", "bias", "stacked parameters"])
def test_bfloat16_is_rounded_once(name: str) -> None:
    model = randomised(MERGEABLE[name](), 2).to(torch.bfloat16)
    exact = merged(copy.deepcopy(model).to(torch.float32))
    for key, tensor in synced(*prepared(model)).items():
        torch.testing.assert_close(tensor, exact[key].to(torch.bfloat16), rtol=2**-8, atol=1e-6)
    found = synced(*prepared(model, torch.float32))  # what is rounded, before it is
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, exact[key], rtol=2e-6, atol=2e-6)


def test_base_bits_after_a_thousand_syncs() -> None:
    layers = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 24))
    tuned = get_peft_model(layers, LoraConfig(r=3, target_modules=["0"], modules_to_save=["1"]))
    model = randomised(tuned.to(torch.bfloat16), 3)
    producer, plan = prepared(model, limit=1 << 12)
    before, first = snapshot(model), synced(producer, plan)
    for _ in range(999):
        last = synced(producer, plan)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, first[key]) for key, tensor in last.items())


def test_each_sync_sees_the_adapter_of_then() -> None:
    model = randomised(MERGEABLE["plain"](), 4)
    producer, plan = prepared(model)
    for seed in range(3):
        randomised(model, seed)
        expected = merged(model)
        assert torch.equal(synced(producer, plan)["dense.weight"], expected["dense.weight"])


def test_digests_and_named_tensors_are_of_the_merged_weights() -> None:
    model = randomised(MERGEABLE["dora"](), 5)
    producer, plan = prepared(model, torch.bfloat16)
    bytes_sent = synced(producer, plan)
    producer.open()
    digests = producer.digests([spec.name for spec in plan.specs])
    named = {name: tensor.clone() for name, tensor in producer.named_tensors()}
    producer.close()
    assert digests == [digest(bytes_sent[spec.name], word_bytes=spec.word_bytes) for spec in plan.specs]
    for key, tensor in merged(model).items():
        torch.testing.assert_close(named[key], tensor, rtol=2e-6, atol=2e-6)


def test_only_what_is_not_merged_is_handed_over_in_place() -> None:
    model = randomised(MERGEABLE["plain"](), 6)
    producer, plan = prepared(model, limit=256)
    producer.open()
    for bucket in plan.buckets:
        tuned = any(
            meta.name in ("table.weight", "dense.weight", "wide.weight", "image.weight") for meta in bucket.tensors
        )
        if tuned:
            assert producer.references(bucket) is None
        if {meta.name for meta in bucket.tensors} <= {"head.weight", "stack.up", "stack.down"}:
            assert producer.references(bucket) is not None
    producer.close()


@pytest.fixture
def trainers_precision() -> Iterator[list[Any]]:
    """What a trainer may set for its own products; put back afterwards."""
    known: Any = torch.backends
    backends = [known.cuda.matmul, known.mkldnn.matmul]
    before = [backend.fp32_precision for backend in backends]
    yield backends
    for backend, precision in zip(backends, before, strict=True):
        backend.fp32_precision = precision


@pytest.mark.parametrize("way", ["of old", "of new"])
def test_the_trainers_precision_does_not_reach_the_merge(way: str, trainers_precision: list[Any]) -> None:
    torch.manual_seed(0)
    model = randomised(get_peft_model(nn.Sequential(nn.Linear(256, 256)), LoraConfig(r=64, target_modules=["0"])), 7)
    expected = merged(model)["0.weight"]
    if way == "of old":
        torch.set_float32_matmul_precision("medium")
    else:
        for backend, precision in zip(trainers_precision, ("tf32", "bf16"), strict=True):
            backend.fp32_precision = precision
    producer, plan = prepared(model, limit=1 << 20)
    with torch.autocast("cpu", torch.bfloat16):
        found = synced(producer, plan)["0.weight"]
    assert [backend.fp32_precision for backend in trainers_precision] == ["tf32", "bf16"]
    assert torch.equal(found, expected)


def test_adapters_that_were_injected_without_a_peft_model() -> None:
    model = randomised(inject_adapter_in_model(config(), Zoo()), 8)
    assert find_trainer(model) is LoRAProducer
    found = synced(*prepared(model))
    assert list(found) == list(Zoo().state_dict())
    dense: Any = model.dense
    assert torch.equal(found["dense.weight"], dense.base_layer.weight + dense.get_delta_weight("default"))


def test_plain_modules_do_not_come_here() -> None:
    assert find_trainer(Zoo()) is ModuleProducer


def _merged_already() -> Any:
    model: Any = get_peft_model(Zoo(), config())
    model.merge_adapter()
    return model


def _disabled() -> Any:
    model: Any = get_peft_model(Zoo(), config())
    model.base_model.disable_adapter_layers()
    return model


def _two_doras() -> Any:
    model: Any = get_peft_model(Zoo(), config(use_dora=True))
    model.add_adapter("other", config())
    model.base_model.set_adapter(["default", "other"])
    return model


def _grouped() -> Any:
    return get_peft_model(nn.Sequential(nn.Conv2d(4, 4, 3, groups=2)), LoraConfig(r=2, target_modules=["0"]))


def _no_bias() -> Any:
    return get_peft_model(Zoo(), config(target_modules=["wide"], lora_bias=True))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "ia3": (
        lambda: get_peft_model(Zoo(), IA3Config(target_modules=["dense"], feedforward_modules=[])),
        "'default' is of PEFT type IA3",
    ),
    "merged": (_merged_already, r"base_model.model.table has its adapters default merged.*unmerge_adapter\(\)"),
    "disabled": (_disabled, "adapters of base_model.model.table are disabled"),
    "two doras": (_two_doras, "table has active adapters default, other, one of them DoRA"),
    "grouped convolution": (_grouped, "model.0 is a convolution in 2 groups"),
    "no bias": (_no_bias, "wide has no bias that the lora_bias"),
    "attention": (
        lambda: get_peft_model(nn.Sequential(nn.MultiheadAttention(8, 2)), LoraConfig(r=2, target_modules=["0"])),
        "is a peft.tuners.lora.layer.MultiheadAttention",
    ),
    "tokens": (
        lambda: get_peft_model(Zoo(), config(target_modules=["dense"], trainable_token_indices={"table": [1, 2]})),
        "table is a peft.*TrainableTokensWrapper",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]
    producer = LoRAProducer(model := make())
    with pytest.raises(UnsupportedError, match=words):
        producer.metadata()
    del model


def test_prompts_are_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    base = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8))
    model = get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert find_trainer(model) is LoRAProducer
    with pytest.raises(UnsupportedError, match="PREFIX_TUNING"):
        LoRAProducer(model).metadata()


def test_another_active_adapter_needs_another_connect() -> None:
    model = randomised(get_peft_model(Zoo(), config()), 9)
    model.add_adapter("other", config(r=2))
    producer, _ = prepared(model)
    model.set_adapter("other")
    with pytest.raises(MismatchError, match=r"other active adapters than at connect: table\.weight"):
        producer.open()


@pytest.mark.parametrize("kind", [LoRAProducer, AdapterProducer])
def test_a_scaling_that_changed_is_seen_also_where_module_and_adapter_have_as_many_tensors(kind: Any) -> None:
    # A base weight and two factors; two factors and their scaling.
    model: Any = get_peft_model(nn.Sequential(nn.Linear(8, 8, bias=False)), config(target_modules=["0"]))
    randomised(model, 1)
    producer = kind(model)
    plan = Plan.pack(producer.metadata(), 4096)
    producer.prepare(plan, [0], Group(0, 1, None, 5.0))
    brought = []
    for scaling in (1.0, 2.0, 4.0):
        model.base_model.model[0].scaling["default"] = scaling
        fresh = kind(model)
        fresh.prepare(Plan.pack(fresh.metadata(), 4096), [0], Group(0, 1, None, 5.0))
        brought.append(synced(producer, plan))
        expected = synced(fresh, plan)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in brought[-1].items())
    assert any(not torch.equal(tensor, brought[0][name]) for name, tensor in brought[1].items())
