"""What every producer must do, as plain functions that raise `AssertionError`. Every trainer rank calls them.

for check in PRODUCER_CHECKS:
    check(ProducerBench(make=..., change=..., group=..., deadline_s=...))
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from wsync.deadline import Deadline
from wsync.digest import digest, word_bytes
from wsync.errors import ProtocolError
from wsync.group import Group
from wsync.handshake import merge_specs
from wsync.plan import Plan, TensorSpec, as_bytes
from wsync.protocols import Producer
from wsync.testing.samples import tensor_zoo, tiny_tensors

BUCKET_BYTES = 4096

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerBench:
    """A producer under test, made from tensors that the check chooses."""

    make: Callable[[Tensors], Producer]
    """full tensors by name -> a producer that exports them, from whatever part of them this rank keeps."""

    change: Callable[[Producer, Tensors], None]
    """Give the trainer's tensors new values in place, as an optimizer does."""

    group: Group
    """All trainer ranks."""

    timeout_s: float = 30.0

    def prepared(
        self, tensors: Tensors, senders: Sequence[int], dtype: torch.dtype | None = None
    ) -> tuple[Producer, Plan]:
        """A producer of `tensors` with a plan of small buckets; floating-point ones travel as `dtype`."""
        producer = self.make(tensors)
        by_rank = self.group.round("metadata", list(producer.metadata()), Deadline.after(self.timeout_s))
        specs = merge_specs([cast("Sequence[TensorSpec]", specs) for specs in by_rank])
        wire = [replace(s, dtype=dtype) if dtype is not None and s.dtype.is_floating_point else s for s in specs]
        plan = Plan.pack([replace(spec, word_bytes=word_bytes(spec)) for spec in wire], BUCKET_BYTES)
        producer.prepare(plan, senders, self.group)
        return producer, plan

    def everyone(self) -> list[int]:
        """All ranks."""
        return list(range(self.group.world_size))


def check_every_layout(bench: ProducerBench) -> None:
    """Every dtype and shape, and one tensor of several buckets, three syncs with new values, one sender, then all."""
    for senders in ([0], bench.everyone()):
        producer, plan = bench.prepared(tensor_zoo(0, 5 * BUCKET_BYTES), senders)
        for seed in range(3):
            tensors = tensor_zoo(seed, 5 * BUCKET_BYTES)
            bench.change(producer, tensors)
            _check_equal(_sync(bench, producer, plan, senders), tensors)


def check_many_tiny(bench: ProducerBench) -> None:
    """1,000 tensors of a few elements, narrow odd sizes before wider dtypes."""
    tensors = tiny_tensors(1, 1000)
    producer, plan = bench.prepared(tensors, [0])
    _check_equal(_sync(bench, producer, plan, [0]), tensors)


def check_cast(bench: ProducerBench) -> None:
    """What travels has been rounded once, to the wire dtype."""
    tensors = {f"w{i}": torch.randn(9, 5 + i, generator=torch.Generator().manual_seed(i)) for i in range(4)}
    producer, plan = bench.prepared(tensors, [0], torch.bfloat16)
    _check_equal(_sync(bench, producer, plan, [0]), {name: t.to(torch.bfloat16) for name, t in tensors.items()})


def check_digests(bench: ProducerBench) -> None:
    """The shares of all ranks add up to the digest of the full tensor, however it is cut and whoever holds replicas."""
    tensors = tensor_zoo(4, 3 * BUCKET_BYTES)
    producer, plan = bench.prepared(tensors, [0])
    names = [spec.name for spec in plan.specs]
    producer.open()
    mine = list(producer.digests(names))
    producer.close()
    shares = bench.group.round("digests", mine, Deadline.after(bench.timeout_s))
    for spec, column in zip(plan.specs, zip(*cast("Sequence[Sequence[int]]", shares), strict=True), strict=True):
        whole = digest(tensors[spec.name], word_bytes=spec.word_bytes)
        assert sum(column) % 2**64 == whole, f"the shares of {spec.name} do not add up to its digest"


def check_named_tensors(bench: ProducerBench) -> None:
    """Full tensors one by one, in the trainer's dtype, on every rank."""
    tensors = tensor_zoo(5, 3 * BUCKET_BYTES)
    producer, _ = bench.prepared(tensors, [0], torch.bfloat16)
    producer.open()
    _check_equal({name: tensor.clone() for name, tensor in producer.named_tensors()}, tensors)
    producer.close()


def check_not_open(bench: ProducerBench) -> None:
    """Before `open` and after `close` there is nothing to iterate over, and the call itself says so."""
    producer, _ = bench.prepared(tensor_zoo(8, BUCKET_BYTES), [0])
    for when in ("before open", "after close"):
        words = ""
        try:
            producer.named_tensors()
        except ProtocolError as error:
            words = str(error)
        assert "open" in words, f"named_tensors {when} does not say what to call: {words!r}"
        producer.open()
        producer.close()


def check_references(bench: ProducerBench) -> None:
    """What is handed out by reference is what would have been put into the slot."""
    tensors = tensor_zoo(6, 3 * BUCKET_BYTES)
    producer, plan = bench.prepared(tensors, bench.everyone())
    producer.open()
    for bucket in plan.buckets:
        references = producer.references(bucket)
        for meta, tensor in zip(bucket.tensors, references or (), strict=references is not None):
            chunk = as_bytes(tensors[meta.name])[meta.chunk_offset :][: meta.chunk_nbytes]
            assert torch.equal(as_bytes(tensor), chunk), f"the reference to {meta.name} has other bytes"
    producer.close()


PRODUCER_CHECKS: tuple[Callable[[ProducerBench], None], ...] = (
    check_every_layout,
    check_many_tiny,
    check_cast,
    check_digests,
    check_named_tensors,
    check_not_open,
    check_references,
)


def _sync(
    bench: ProducerBench, producer: Producer, plan: Plan, senders: Sequence[int], *, again: bool = False
) -> dict[str, torch.Tensor]:
    """What a session does. The tensors as a sender's poisoned slots bring them; nothing on other ranks."""
    flat = {spec.name: torch.full((spec.nbytes,), 0xA5, dtype=torch.uint8) for spec in plan.specs}
    sending = bench.group.rank in senders
    producer.open()
    for bucket in plan.buckets:
        slot = torch.full((plan.capacity,), 0xFF, dtype=torch.uint8) if sending else None
        producer.stage(bucket, slot)
        bench.group.agree(f"bucket {bucket.index}", None, Deadline.after(bench.timeout_s))
        producer.fill(bucket, slot)
        if slot is not None:
            for meta in bucket.tensors:
                flat[meta.name][meta.chunk_offset :][: meta.chunk_nbytes] = slot[meta.offset :][: meta.chunk_nbytes]
    confirmed = bench.group.gather("confirm", producer.confirm, Deadline.after(bench.timeout_s))
    producer.close()
    if not all(confirmed) and not again:
        return _sync(bench, producer, plan, senders, again=True)
    assert all(confirmed), "the producer does not confirm what it looked at closely"
    return {s.name: flat[s.name].view(s.dtype).view(s.shape) for s in plan.specs} if sending else {}


def _check_equal(found: Tensors, expected: Tensors) -> None:
    if not found:
        return
    assert found.keys() == expected.keys(), f"names differ: {sorted(found.keys() ^ expected.keys())[:5]}"
    wrong = [name for name, t in expected.items() if not torch.equal(as_bytes(found[name]), as_bytes(t))]
    assert not wrong, f"wrong bytes in {wrong[:5]}"
