"""`split_weight_chunks` and `merge_weight_chunks` are inverse, lazy and strict."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wsync.errors import ConfigError, MismatchError
from wsync.plan import Plan, TensorMeta, TensorSpec, merge_weight_chunks, split_weight_chunks

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

Chunk = tuple[TensorMeta, torch.Tensor]
DTYPES = [
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, also those of NaNs; a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool().view(shape)
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    def flat(t: torch.Tensor) -> torch.Tensor:
        return t.resolve_conj().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)

    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(flat(a), flat(b))


@st.composite
def weights(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
    rows = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.sampled_from("ctse")), max_size=8))
    made: dict[str, torch.Tensor] = {}
    for i, (shape, dtype, kind) in enumerate(rows):
        tensor = random_tensor(shape, dtype, i)
        if kind == "t":
            tensor = tensor.permute(list(reversed(range(tensor.dim()))))
        elif kind == "s" and tensor.dim():
            tensor = tensor[::2]
        elif kind == "e":
            tensor = tensor.expand(3, *tensor.shape)
        made[f"t{i}"] = tensor
    return made


@given(weights(), st.integers(256, 2048))
def test_round_trip_keeps_every_bit_and_the_order(tensors: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    merged = list(merge_weight_chunks(split_weight_chunks(tensors.items(), bucket_bytes)))
    assert [name for name, _ in merged] == list(tensors)
    assert all(same_bits(tensor, tensors[name]) for name, tensor in merged)


@given(weights(), st.integers(256, 2048))
def test_chunks_lie_where_a_plan_puts_them(tensors: dict[str, torch.Tensor], bucket_bytes: int) -> None:
    specs = [TensorSpec(name=name, shape=tuple(t.shape), dtype=t.dtype) for name, t in tensors.items()]
    plan = Plan.pack(specs, bucket_bytes)
    chunks = list(split_weight_chunks(tensors.items(), bucket_bytes))
    assert [meta for meta, _ in chunks] == [meta for bucket in plan.buckets for meta in bucket.tensors]
    assert all(data.dtype == torch.uint8 and data.shape == (meta.chunk_nbytes,) for meta, data in chunks)
    moved = iter(chunks)

    def slots() -> Iterator[Chunk]:
        for bucket in plan.buckets:
            slot = torch.empty(plan.capacity, dtype=torch.uint8)
            for meta in bucket.tensors:
                slot[meta.offset : meta.offset + meta.chunk_nbytes] = next(moved)[1]
            yield from bucket.views(slot)

    assert all(same_bits(tensor, tensors[name]) for name, tensor in merge_weight_chunks(slots()))


def test_conjugated_views_travel_as_they_read() -> None:
    tensor = torch.randn(5, 3, dtype=torch.complex64)
    ((_, back),) = merge_weight_chunks(split_weight_chunks([("w", tensor.conj())], 256))
    assert torch.equal(back, tensor.conj())


def test_whole_contiguous_tensors_are_not_copied() -> None:
    tensor = torch.randn(8, 8)
    ((_, data),) = split_weight_chunks([("w", tensor)], 4096)
    assert data.data_ptr() == tensor.data_ptr()
    ((_, back),) = merge_weight_chunks(split_weight_chunks([("w", tensor)], 4096))
    assert back.data_ptr() == tensor.data_ptr()


def test_splitting_takes_one_tensor_at_a_time() -> None:
    taken = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(3):
            taken.append(i)
            yield f"t{i}", torch.randn(200)

    pieces = split_weight_chunks(source(), 256)
    assert taken == []
    assert [next(pieces)[0].chunk_offset for _ in range(4)] == [0, 256, 512, 768]
    assert taken == [0]
    with pytest.raises(ConfigError, match="100"):
        next(split_weight_chunks(source(), 100))


def test_bytes_at_an_odd_address_come_back_as_a_tensor() -> None:
    tensor = torch.randn(6)
    buffer = torch.zeros(25, dtype=torch.uint8)
    buffer[1:] = tensor.view(torch.uint8)
    ((meta, _),) = split_weight_chunks([("w", tensor)], 256)
    ((_, back),) = merge_weight_chunks([(meta, buffer[1:])])
    assert torch.equal(back, tensor)


def chunks_of_three() -> list[Chunk]:
    """`a` whole, `b` in three pieces, `c` empty, `d` whole."""
    sizes = {"a": 5, "b": 150, "c": 0, "d": 9}
    return list(split_weight_chunks([(name, torch.randn(n)) for name, n in sizes.items()], 256))


def drop(index: int) -> list[Chunk]:
    chunks = chunks_of_three()
    del chunks[index]
    return chunks


def changed(index: int, **fields: object) -> list[Chunk]:
    chunks = chunks_of_three()
    meta, data = chunks[index]
    chunks[index] = (replace(meta, **fields), data)  # type: ignore[arg-type]
    return chunks


def resized(index: int, nbytes: int) -> list[Chunk]:
    chunks = chunks_of_three()
    chunks[index] = (chunks[index][0], torch.zeros(nbytes, dtype=torch.uint8))
    return chunks


CHUNKS = chunks_of_three()
BAD = {
    "first piece missing": (drop(1), "gap"),
    "middle piece missing": (drop(2), "gap"),
    "last piece missing": (drop(3), "c begins while b has 512 of 600 bytes"),
    "stream ends early": (CHUNKS[:3], "ends after 512 of 600 bytes"),
    "piece twice": ([*CHUNKS[:3], CHUNKS[2], *CHUNKS[3:]], "overlap"),
    "tensor twice": ([*CHUNKS, CHUNKS[0]], "second time"),
    "empty tensor twice": ([*CHUNKS, CHUNKS[4]], "second time"),
    "cut tensor twice": ([*CHUNKS, *CHUNKS[1:4]], "second time"),
    "pieces overlap": (changed(2, chunk_offset=128), "overlap"),
    "pieces swapped": ([CHUNKS[0], CHUNKS[2], CHUNKS[1], *CHUNKS[3:]], "gap"),
    "too long": (changed(0, chunk_nbytes=24), "not a piece"),
    "nothing in it": (changed(2, chunk_nbytes=0), "not a piece"),
    "other shape": (changed(2, shape=(75, 2)), "its first piece said"),
    "other dtype": (changed(3, dtype=torch.int32), "its first piece said"),
    "data too short": (resized(2, 255), "255 bytes of data"),
    "data too long": (resized(0, 21), "21 bytes of data"),
    "data for an empty tensor": (resized(4, 4), "4 bytes of data"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case: str) -> None:
    chunks, message = BAD[case]
    with pytest.raises(MismatchError, match=message):
        list(merge_weight_chunks(chunks))
