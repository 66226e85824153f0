"""Shapes, memory needs and comparisons of the bench: arithmetic only."""

import io
import math
from dataclasses import replace

import pytest
import torch

from wsync.bench.cases import AUTO_BYTES, CASES, numel_of
from wsync.bench.ceilings import two_copies_way
from wsync.bench.job import Job, Row, Taken
from wsync.bench.samples import Samples
from wsync.bench.show import table, tiny_to_large

JOB = Job(
    case="tiny",
    transport="shm",
    producer="module",
    ranks=1,
    bucket_bytes=1 << 20,
    scale=1.0,
    actor_dtype=torch.float32,
    dtype=torch.bfloat16,
    rounds=3,
    baselines=True,
    timeout_s=60.0,
)


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("dense-0.5b", 290, 494_032_768),
        ("dense-7b", 339, 7_615_616_512),
        ("moe", 4_719, 8_099_779_584),
        ("tiny", 10_000, 163_840_000),
        ("large", 100, 163_840_000),
    ],
)
def test_scale_changes_bytes_and_not_the_number_of_tensors(name: str, tensors: int, elements: int) -> None:
    case = CASES[name]
    assert numel_of(case.shapes(1.0)) == elements
    for scale in (1.0, 0.25, 0.01, 1e-6):
        shapes = case.shapes(scale)
        assert len(shapes) == tensors
        assert min(math.prod(shape) for shape in shapes.values()) > 0
    assert numel_of(case.shapes(0.25)) == pytest.approx(0.25 * elements, rel=0.02)
    assert numel_of(case.shapes(case.auto_scale(2))) * 2 <= 1.02 * AUTO_BYTES


@pytest.mark.parametrize("name", ["dense-0.5b", "dense-7b"])
def test_dense_shapes_are_those_of_qwen2(name: str) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    small = name == "dense-0.5b"
    config = Qwen2Config(
        vocab_size=151936 if small else 152064,
        hidden_size=896 if small else 3584,
        intermediate_size=4864 if small else 18944,
        num_hidden_layers=24 if small else 28,
        num_attention_heads=14 if small else 28,
        num_key_value_heads=2 if small else 4,
        tie_word_embeddings=small,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert dict(CASES[name].shapes(1.0)) == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_two_copies_end_where_they_should() -> None:
    tensors = [torch.randn(size) for size in (5, 700, 64, 1)]
    for dtype in (torch.bfloat16, torch.float32):
        target = torch.full((770,), 7.0, dtype=dtype)
        two_copies_way(tensors, target, 256)()
        assert torch.equal(target, torch.cat(tensors).to(dtype))


def row(job: Job, *seconds: float, wrong: tuple[str, ...] = ()) -> Row:
    samples = Samples(seconds=seconds, references={job.floor: (0.5,) * (len(seconds) + 1)})
    return Row(job=job, taken=Taken(samples=samples, loops={}, stages={}, through_loader=0, wrong=wrong))


def test_a_row_says_what_its_samples_say() -> None:
    one = row(JOB, 1.0, 3.0, 2.0)
    shown = one.as_json()
    assert (shown["seconds"], shown["floor_seconds"], shown["ratio_to_floor"]) == (2.0, 0.5, 4.0)
    assert (shown["nbytes"], shown["dtype"], shown["floor"]) == (327_680_000, "bfloat16", "two copies")
    assert one.ok
    assert not row(JOB, 1.0, wrong=("a",)).ok
    failed = Row(job=JOB, error="no memory")
    assert not failed.ok
    assert (failed.as_json()["seconds"], failed.as_json()["error"]) == (None, "no memory")


def test_tiny_is_compared_with_large_of_the_same_kind_only() -> None:
    large = replace(JOB, case="large")
    rows = [row(JOB, 3.0), row(large, 2.0), row(replace(JOB, transport="gloo"), 1.0)]
    assert tiny_to_large(rows) == [("shm, module, 1 rank(s)", 1.5)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_same_table_for_people_and_for_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rows = [
        row(JOB, 0.02),
        row(replace(JOB, case="large"), 0.01, wrong=("block.7.weight",)),
        Row(job=replace(JOB, ranks=2), error="why"),
    ]
    live, plain = Terminal(), io.StringIO()
    table(rows, live)
    table(rows, plain)
    for out in (live.getvalue(), plain.getvalue()):
        assert "16.38" in out  # GB/s
        assert "FAILED" in out
        assert "tiny over shm, module, 2 rank(s), buckets of 1 MiB: failed\nwhy" in out
        assert "WRONG BYTES in 1 of 100 tensors, first block.7.weight" in out
        assert "tiny costs 2.00 times as long a byte as large" in out
    assert "\x1b" in live.getvalue()
    assert "\x1b" not in plain.getvalue()


def test_memory_that_a_row_needs() -> None:
    elements = 163_840_000
    assert JOB.needed_bytes == elements * 4 + 3 * elements * 2 + 4 * (1 << 20)
    assert replace(JOB, producer="fsdp2", ranks=2).needed_bytes > 3 * JOB.needed_bytes / 2
