"""A plain module through a producer: hard tensors bit for bit, in place where they lie whole, nothing kept alive."""

import gc
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from wsync.adapters.trainers.exchange import Exchange
from wsync.adapters.trainers.module import ModuleProducer
from wsync.digest import digest, word_bytes
from wsync.errors import ClosedError, MismatchError, ProtocolError, TransportError, UnsupportedError
from wsync.group import Group
from wsync.plan import Plan, TensorSpec


class Awkward(nn.Module):
    """Tensors of every shape, stride and dtype that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        bits = torch.Generator().manual_seed(1)
        self.scalar = nn.Parameter(torch.randn((), generator=bits))
        self.transposed = nn.Parameter(torch.randn(5, 7, generator=bits).t())
        self.strided = nn.Parameter(torch.randn(6, 10, generator=bits)[::2, 1::3])
        self.channels_last = nn.Parameter(torch.randn(2, 3, 4, 5, generator=bits).to(memory_format=torch.channels_last))
        self.large = nn.Parameter(torch.randn(37, 41, generator=bits))
        self.register_buffer("expanded", torch.randn(3, 1, generator=bits).expand(3, 5))
        self.register_buffer("empty", torch.empty(4, 0))
        self.register_buffer("fp8", torch.randn(9, generator=bits).to(torch.float8_e4m3fn))
        self.register_buffer("fp16", torch.randn(9, generator=bits).to(torch.float16))
        self.register_buffer("bf16", torch.randn(3, 3, generator=bits).to(torch.bfloat16))
        self.register_buffer("flags", torch.randn(7, generator=bits) > 0)
        self.register_buffer("bytes", torch.randint(-128, 127, (11,), generator=bits, dtype=torch.int8))
        self.register_buffer("complex", torch.randn(3, 4, generator=bits, dtype=torch.complex64).t())
        self.register_buffer("conjugate", torch.randn(3, generator=bits, dtype=torch.complex128).conj())
        self.register_buffer("tables", torch.randn(8, generator=bits), persistent=False)


def prepared(module: nn.Module, limit: int, dtype: torch.dtype | None = None) -> tuple[ModuleProducer, Plan]:
    producer = ModuleProducer(module)
    specs: Sequence[TensorSpec] = producer.metadata()
    if dtype is not None:
        specs = [TensorSpec(name=s.name, shape=s.shape, dtype=dtype, owners=s.owners) for s in specs]
    plan = Plan.pack([replace(spec, word_bytes=word_bytes(spec)) for spec in specs], limit)
    producer.prepare(plan, [0], Group(0, 1, None, 5.0))
    return producer, plan


def filled(producer: ModuleProducer, plan: Plan) -> dict[str, torch.Tensor]:
    """Every tensor as the buckets bring it, put together from its chunks."""
    flat = {spec.name: torch.empty(spec.nbytes, dtype=torch.uint8) for spec in plan.specs}
    for bucket in plan.buckets:
        slot = torch.randint(0, 255, (bucket.nbytes,), dtype=torch.uint8)
        producer.stage(bucket, slot)
        producer.fill(bucket, slot)
        for meta in bucket.tensors:
            chunk = slot[meta.offset :][: meta.chunk_nbytes]
            flat[meta.name][meta.chunk_offset :][: meta.chunk_nbytes] = chunk
    return {spec.name: flat[spec.name].view(spec.dtype).view(spec.shape) for spec in plan.specs}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)

    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("limit", [256, 1024, 1 << 20])
def test_every_kind_of_tensor_comes_bit_for_bit(limit: int) -> None:
    module = Awkward()
    producer, plan = prepared(module, limit)
    producer.open()
    result = filled(producer, plan)
    live = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert set(result) == set(live)
    assert [name for name in live if not same_bits(result[name], live[name])] == []


def test_the_cast_is_that_of_torch() -> None:
    module = nn.Linear(33, 17)
    producer, plan = prepared(module, 512, torch.bfloat16)
    producer.open()
    result = filled(producer, plan)
    assert same_bits(result["weight"], module.weight.to(torch.bfloat16))


def test_non_persistent_buffers_are_optional() -> None:
    module = Awkward()
    specs = {spec.name: spec for spec in ModuleProducer(module).metadata()}
    assert [name for name, spec in specs.items() if spec.optional] == ["tables"]


def test_contiguous_tensors_are_referenced_and_others_are_not() -> None:
    module = Awkward()
    producer, plan = prepared(module, 256)
    producer.open()
    for bucket in plan.buckets:
        names = {meta.name for meta in bucket.tensors}
        references = producer.references(bucket)
        if references is None:
            assert names & {"transposed", "strided", "channels_last", "expanded", "complex"}
            continue
        for meta, reference in zip(bucket.tensors, references, strict=True):
            live = module.get_parameter(meta.name) if hasattr(module, meta.name) and meta.name in {"scalar"} else None
            tensor = getattr(module, meta.name)
            assert same_bits(reference, tensor if meta.is_whole else meta.elements.view(tensor.reshape(-1)))
            assert not reference.requires_grad
            assert live is None or reference.data_ptr() == live.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_a_contiguous_tensor_are_referenced_by_their_elements(dtype: torch.dtype) -> None:
    module = nn.Linear(70, 33, bias=False)
    producer, plan = prepared(module, 512, dtype)
    producer.open()
    assert len(plan.buckets) > 5
    found = []
    for bucket in plan.buckets:
        references = producer.references(bucket)
        assert references is not None
        [chunk], [meta] = references, bucket.tensors
        assert chunk.data_ptr() == module.weight.data_ptr() + meta.elements.offset * 4, "it was copied"
        assert chunk.shape == (meta.chunk_nbytes // dtype.itemsize,)
        found.append(chunk)
    assert torch.equal(torch.cat(found), module.weight.reshape(-1))


def test_what_reads_parameters_says_that_the_producer_is_not_open() -> None:
    module = nn.Linear(8, 8)
    producer, plan = prepared(module, 4096)
    for use in (
        producer.named_tensors,
        lambda: producer.references(plan.buckets[0]),
        lambda: producer.stage(plan.buckets[0], torch.empty(4096, dtype=torch.uint8)),
        lambda: producer.digests(["weight"]),
    ):
        with pytest.raises(ProtocolError, match=r"producer of this Linear is not open; call open\(\) first"):
            use()
        producer.open()
        use()
        producer.close()


def test_named_tensors_are_whole_and_in_the_trainers_dtype() -> None:
    module = Awkward()
    producer, _ = prepared(module, 4096, torch.bfloat16)
    producer.open()
    result = dict(producer.named_tensors())
    assert [name for name, tensor in result.items() if not same_bits(tensor, getattr(module, name))] == []
    assert len(result) == 15


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_digests_are_those_of_the_wire_bytes(dtype: torch.dtype | None) -> None:
    module = Awkward() if dtype is None else nn.Linear(37, 11)
    producer, plan = prepared(module, 1024, dtype)
    producer.open()
    result = filled(producer, plan)
    expected = [digest(result[spec.name], word_bytes=spec.word_bytes) for spec in plan.specs]
    assert list(producer.digests([spec.name for spec in plan.specs])) == expected


def test_an_optimizer_step_and_replaced_data_are_seen_at_the_next_open() -> None:
    module = nn.Linear(4, 4)
    producer, plan = prepared(module, 4096)
    for _ in range(3):
        producer.open()
        assert same_bits(filled(producer, plan)["weight"], module.weight)
        producer.close()
        module.weight.data = torch.randn(4, 4)


def test_a_changed_shape_is_named() -> None:
    module = nn.Linear(4, 4)
    producer, _ = prepared(module, 4096)
    module.weight = nn.Parameter(torch.randn(4, 5))
    with pytest.raises(MismatchError, match=r"1 tensors of Linear .*weight .*\(4, 4\).*\(4, 5\)"):
        producer.open()


def test_nothing_keeps_the_module_alive_between_syncs() -> None:
    module = nn.Linear(4, 4)
    producer, plan = prepared(module, 4096)
    producer.open()
    filled(producer, plan)
    producer.close()
    gone, weight_gone = weakref.ref(module), weakref.ref(module.weight)
    del module
    gc.collect()
    assert gone() is None
    assert weight_gone() is None
    with pytest.raises(ClosedError, match="the Linear that this session exports has been garbage collected"):
        producer.open()


def test_a_bucket_must_be_staged_before_it_is_filled() -> None:
    module = nn.Linear(8, 8)
    producer, plan = prepared(module, 256)
    producer.open()
    producer.stage(plan.buckets[0], torch.empty(256, dtype=torch.uint8))
    with pytest.raises(ProtocolError, match="bucket 1 is to be filled, but bucket 0 was staged last"):
        producer.fill(plan.buckets[1], torch.empty(256, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.LazyLinear(3), "weight is not initialised yet"),
        (nn.Linear(3, 3, device="meta"), "weight is on the meta device"),
    ],
)
def test_what_has_no_bytes_is_refused_by_name(module: nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        ModuleProducer(module).metadata()


def test_a_module_whose_parameters_another_framework_partitioned_is_not_taken_for_a_plain_one() -> None:
    module = nn.Linear(4, 4)
    assert ModuleProducer.matches(module)
    setattr(module.weight, "ds_id", 0)  # noqa: B010
    assert not ModuleProducer.matches(module)
    assert not ModuleProducer.matches(module.state_dict())


def opened(producer: ModuleProducer) -> None:
    """As a session opens it: once more, if what it trusted at first was wrong."""
    producer.open()
    if not producer.confirm():
        producer.close()
        producer.open()
        assert producer.confirm()


def test_a_glance_is_not_enough_when_something_changed() -> None:
    module, last = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8)
    module.append(last)
    producer, plan = prepared(module, 4096)
    for _ in range(2):  # closely, then at a glance
        opened(producer)
        assert same_bits(filled(producer, plan)["1.weight"], last.weight)
        producer.close()
    with torch.no_grad():
        last.weight.add_(1)  # in place: the same memory with other values
    opened(producer)
    assert same_bits(filled(producer, plan)["1.weight"], last.weight)
    producer.close()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)  # keeps the old one
    last.weight = nn.Parameter(torch.randn(8, 8))  # as large, elsewhere
    opened(producer)
    assert same_bits(filled(producer, plan)["1.weight"], last.weight)
    producer.close()
    del optimizer
    last.weight.data = torch.randn(8, 9)
    with pytest.raises(MismatchError, match=r"1\.weight"):
        opened(producer)
    module[1] = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(MismatchError, match=r"1\.weight"):
        opened(producer)


class Slots(nn.Module):
    """Two places, of which one is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("first", nn.Parameter(torch.randn(8)))
        self.register_parameter("second", None)


def test_a_parameter_that_moved_to_an_empty_place_is_seen() -> None:
    module = Slots()
    producer, _ = prepared(module, 4096)
    opened(producer)
    producer.close()
    module._parameters.update(first=None, second=module._parameters["first"])
    with pytest.raises(MismatchError, match=r"first .*gone.*second \(is new\)"):
        opened(producer)


def test_a_parameter_that_was_added_is_named() -> None:
    module = nn.Linear(4, 4)
    producer, _ = prepared(module, 4096)
    module.register_buffer("cache", torch.randn(4), persistent=False)  # no checkpoint has it
    opened(producer)
    producer.close()
    module.register_parameter("gain", nn.Parameter(torch.randn(4)))
    with pytest.raises(MismatchError, match=r"gain \(is new\); connect again"):
        opened(producer)


def test_a_tie_that_was_undone_is_named() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    producer, plan = prepared(module, 4096)
    assert [spec.name for spec in plan.specs] == ["0.weight"]
    opened(producer)
    producer.close()
    module[1].weight = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(MismatchError, match=r"1\.weight \(was tied to 0\.weight, is not\)"):
        opened(producer)


def test_memory_that_was_freed_is_refused_before_anything_is_read() -> None:
    module = nn.Linear(4, 4)
    producer, plan = prepared(module, 4096)
    producer.open()
    producer.close()
    module.weight.untyped_storage().resize_(0)
    with pytest.raises(MismatchError, match=r"weight has 64 bytes, of which its storage lacks 64"):
        producer.open()
    module.weight.untyped_storage().resize_(64)
    module.weight.data.normal_()
    producer.open()
    assert same_bits(filled(producer, plan)["weight"], module.weight)


def test_what_is_conjugated_without_a_copy_is_referenced_as_it_shows() -> None:
    module = nn.Module()
    value = torch.randn(6, dtype=torch.complex64)
    module.register_parameter("conjugate", nn.Parameter(value.conj()))
    module.register_parameter("negative", nn.Parameter(torch._neg_view(torch.randn(6))))
    producer, plan = prepared(module, 4096)
    for _ in range(2):  # closely, then at a glance
        producer.open()
        found = producer.references(plan.buckets[0])
        assert found is not None
        for meta, tensor in zip(plan.buckets[0].tensors, found, strict=True):
            assert not tensor.is_conj()
            assert not tensor.is_neg()
            assert same_bits(tensor, getattr(module, meta.name).detach().resolve_neg())
        producer.close()
        next(module.parameters()).data = torch.randn(6, dtype=torch.complex64).conj()


def test_boxes_of_a_fill_that_failed_are_never_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that was given up may still write into them, while the next sync goes on."""
    used: list[tuple[torch.Tensor, torch.Tensor]] = []
    healthy = Exchange.fill

    def fill(self: Exchange, boxes: tuple[torch.Tensor, torch.Tensor], *others: Any, **more: Any) -> None:
        used.append(boxes)
        if len(used) == 2:
            raise TransportError("given up")
        healthy(self, boxes, *others, **more)

    monkeypatch.setattr(Exchange, "fill", fill)
    module = nn.Linear(8, 8)
    producer, plan = prepared(module, 1 << 20)
    [bucket] = plan.buckets
    slot = torch.empty(bucket.nbytes, dtype=torch.uint8)
    for number in range(4):
        producer.open()
        producer.stage(bucket, slot)
        with pytest.raises(TransportError) if number == 1 else nullcontext():
            producer.fill(bucket, slot)
        producer.close()
    assert used[0] is used[1]
    assert used[2] is used[3]
    assert used[1] is not used[2]
    assert all(one is not other for one, other in zip(used[1], used[2], strict=True))
