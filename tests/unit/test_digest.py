"""The digest finds every changed byte and every swapped pair of words, and parts add up to the whole."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wsync import digest as module
from wsync.digest import digest, digest_part, word_bytes
from wsync.plan import Owner, Plan, TensorSpec, split_weight_chunks
from wsync.regions import Region

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

MODULUS = 1 << 64
DTYPES = [
    torch.bool,
    torch.int8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that ordinary tensors need several."""
    monkeypatch.setattr(module, "_CPU_BLOCK_WORDS", 24)


def reference(data: bytes, unit: int, first_word: int = 0) -> int:
    """The definition, word by word, in Python integers."""
    total = 0
    for i in range(0, len(data), unit):
        x = int.from_bytes(data[i : i + unit], "little", signed=unit > 1) % MODULUS
        x ^= (i // unit + first_word) * 0x9E3779B97F4A7C15 % MODULUS
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
        x = (x ^ x >> 27) * 0x94D049BB133111EB % MODULUS
        total += x ^ x >> 31
    return total % MODULUS


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    if dtype is torch.bool:
        return (random_bytes(math.prod(shape), seed) > 127).view(shape)
    return random_bytes(math.prod(shape) * dtype.itemsize, seed).view(dtype).view(shape)


units = st.sampled_from([1, 2, 4, 8])


@given(units, st.integers(0, 90), st.integers(0, 2**40), st.integers(0, 2**16))
def test_it_is_what_the_definition_says(unit: int, words: int, first_word: int, seed: int) -> None:
    data = random_bytes(words * unit, seed)
    assert digest(data, word_bytes=unit, first_word=first_word) == reference(bytes(data.tolist()), unit, first_word)


def test_golden_values_that_must_never_change() -> None:
    data = torch.arange(64, dtype=torch.uint8)
    assert digest(data, word_bytes=8) == 0x07D57C433CE405C5
    assert digest(data, word_bytes=2, first_word=3) == 0x3C5F9472589E918C


@given(units, st.integers(1, 40), st.integers(0, 2**16), st.data())
def test_every_flipped_byte_is_found(unit: int, words: int, seed: int, data: st.DataObject) -> None:
    sent = random_bytes(words * unit, seed)
    before = digest(sent, word_bytes=unit)
    flip = data.draw(st.integers(1, 255))
    for place in range(len(sent)):
        received = sent.clone()
        received[place] ^= flip
        assert digest(received, word_bytes=unit) != before


@given(units, st.integers(2, 12), st.sampled_from(["random", "low bit", "high bit", "small"]), st.integers(0, 2**16))
def test_every_swapped_pair_of_different_words_is_found(unit: int, words: int, kind: str, seed: int) -> None:
    sent = alike_words(unit, words, kind, seed)
    before = digest(sent, word_bytes=unit)
    for i, j in combinations(range(words), 2):
        if not torch.equal(sent[i], sent[j]):
            order = list(range(words))
            order[i], order[j] = j, i
            assert digest(sent[order], word_bytes=unit) != before


def alike_words(unit: int, words: int, kind: str, seed: int) -> torch.Tensor:
    """Words `[words, unit]` that are random, or hard to tell apart."""
    made = random_bytes(words * unit, seed).view(words, unit)
    if kind == "random":
        return made
    if kind == "small":
        made[:, 1:] = 0
        return made
    byte, bit = (0, 1) if kind == "low bit" else (unit - 1, 128)
    flips = made[:, byte] & bit
    made[:] = made[0].clone()
    made[:, byte] ^= flips
    return made


@pytest.mark.parametrize("difference", [1, 1 << 7, 1 << 31, 1 << 32, 1 << 63, 0x8000_8000_8000_8000])
def test_no_swap_of_two_nearly_equal_words_is_missed_anywhere_in_a_page(difference: int) -> None:
    """All pairs of 1024 places, two words that differ by `difference`: the change that each place sees is unique."""
    word = np.full(1024, 0x3F80_3F80_3F80_3F80, np.uint64)
    a, b = (mixed(word), mixed(word ^ np.uint64(difference)))
    assert len(np.unique(b - a)) == 1024


def mixed(words: np.typing.NDArray[np.uint64]) -> np.typing.NDArray[np.uint64]:
    """What each of `words` adds, got from the digest one word at a time."""
    return np.array(
        [digest(torch.tensor([w]), word_bytes=8, first_word=i) for i, w in enumerate(words.view(np.int64).tolist())],
        np.uint64,
    )


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """Boxes that together are a tensor of `shape`, cut at random along random dims."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if not shape:
            return [Region.whole(shape)]
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[dim]))
        left, right = list(sizes), list(sizes)
        moved = list(offsets)
        left[dim], right[dim], moved[dim] = cut, sizes[dim] - cut, offsets[dim] + cut
        boxes += [(offsets, tuple(left)), (tuple(moved), tuple(right))]
    return [Region.box(shape, offsets, sizes) for offsets, sizes in boxes]


shapes = st.lists(st.integers(1, 12), max_size=4).map(tuple)
cut_tensors = shapes.flatmap(lambda shape: st.tuples(st.just(shape), partitions(shape)))


@given(cut_tensors, st.sampled_from(DTYPES), st.integers(0, 2**16))
def test_parts_add_up_to_the_whole(case: tuple[tuple[int, ...], list[Region]], dtype: torch.dtype, seed: int) -> None:
    shape, parts = case
    full = random_tensor(shape, dtype, seed)
    owners = tuple(Owner(rank=rank, region=part) for rank, part in enumerate(parts))
    unit = word_bytes(TensorSpec(name="w", shape=shape, dtype=dtype, owners=owners))
    flat = full.view(-1)
    shares = [digest_part(part.view(flat), part, word_bytes=unit) for part in parts]
    assert sum(shares) % MODULUS == digest(full, word_bytes=unit)


@given(cut_tensors, st.sampled_from(DTYPES))
def test_words_are_as_large_as_the_parts_allow(case: tuple[tuple[int, ...], list[Region]], dtype: torch.dtype) -> None:
    shape, parts = case
    owners = tuple(Owner(rank=rank, region=part) for rank, part in enumerate(parts))
    unit = word_bytes(TensorSpec(name="w", shape=shape, dtype=dtype, owners=owners))
    edges = [math.prod(shape) * dtype.itemsize]
    for part in parts:
        starts, length = part.runs()
        edges += [edge * dtype.itemsize for start in starts.tolist() for edge in (start, start + length)]
    largest = max(u for u in (8, 4, 2, 1) if not any(edge % u for edge in edges))
    assert unit <= largest
    assert unit == largest or any(part.numel and not part.is_monotone for part in parts)


@given(shapes, st.sampled_from(DTYPES), st.integers(256, 1024), st.integers(0, 2**16))
def test_chunks_add_up_to_the_whole(shape: tuple[int, ...], dtype: torch.dtype, bucket: int, seed: int) -> None:
    full = random_tensor(shape, dtype, seed)
    unit = word_bytes(TensorSpec(name="w", shape=shape, dtype=dtype))
    shares = [
        digest(data, word_bytes=unit, first_word=meta.chunk_offset // unit)
        for meta, data in split_weight_chunks([("w", full)], bucket)
    ]
    assert sum(shares) % MODULUS == digest(full, word_bytes=unit)


@given(cut_tensors, st.sampled_from(DTYPES), st.integers(0, 2**16), st.data())
def test_a_byte_flipped_in_a_part_is_found(
    case: tuple[tuple[int, ...], list[Region]], dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    shape, parts = case
    assume(dtype is not torch.bool)
    full = random_tensor(shape, dtype, seed)
    owners = tuple(Owner(rank=rank, region=part) for rank, part in enumerate(parts))
    unit = word_bytes(TensorSpec(name="w", shape=shape, dtype=dtype, owners=owners))
    part = data.draw(st.sampled_from([part for part in parts if part.numel]))
    held = part.view(full.view(-1)).clone(memory_format=torch.contiguous_format)
    before = digest_part(held, part, word_bytes=unit)
    raw = held.view(-1).view(torch.uint8)
    raw[data.draw(st.integers(0, raw.numel() - 1))] ^= data.draw(st.integers(1, 255))
    assert digest_part(held, part, word_bytes=unit) != before


def test_a_part_is_not_taken_for_another_one() -> None:
    held = random_tensor((8, 4), torch.float32, 3)
    shares = {digest_part(held, Region.box((8, 16), (0, column), (8, 4)), word_bytes=8) for column in (0, 4, 8, 12)}
    assert len(shares) == 4


def test_bytes_at_an_odd_address_and_tensors_with_gradients_are_read() -> None:
    data = random_bytes(81, 1)
    assert digest(data[1:], word_bytes=8) == digest(data[1:].clone(), word_bytes=8)
    weight = torch.nn.Parameter(torch.randn(6, 4))
    assert digest(weight.t(), word_bytes=8) == digest(weight.detach().t().contiguous(), word_bytes=8)


def test_empty_tensors_and_parts_add_nothing() -> None:
    spec = TensorSpec(name="e", shape=(0, 3), dtype=torch.bfloat16, owners=(Owner(rank=0, region=Region.span(0, 0)),))
    assert word_bytes(spec) == 8
    assert digest(torch.empty(0, 3, dtype=torch.bfloat16), word_bytes=8) == 0
    assert digest_part(torch.empty(0, 3), Region.whole((0, 3)), word_bytes=8) == 0


def test_words_that_would_straddle_are_refused() -> None:
    with pytest.raises(ValueError, match="whole words of 8 bytes"):
        digest(random_bytes(12, 0), word_bytes=8)
    with pytest.raises(ValueError, match="whole words of 4 bytes"):
        digest_part(random_tensor((4, 2), torch.bfloat16, 0), Region.box((4, 5), (0, 0), (4, 2)), word_bytes=4)
    with pytest.raises(ValueError, match="7 elements of data"):
        digest_part(torch.randn(7), Region.span(0, 8), word_bytes=4)


def test_a_plan_of_a_cut_tensor_keeps_whole_words_in_every_chunk() -> None:
    spec = TensorSpec(name="w", shape=(333, 4), dtype=torch.bfloat16)
    metas = [meta for bucket in Plan.pack([spec], 512).buckets for meta in bucket.tensors]
    assert len(metas) == 6
    assert all(meta.chunk_offset % word_bytes(spec) == meta.chunk_nbytes % word_bytes(spec) == 0 for meta in metas)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_gives_the_same_digest() -> None:
    full = random_tensor((512, 96), torch.bfloat16, 9)
    part = Region.box(full.shape, (0, 32), (512, 32))
    for unit in (2, 4, 8):
        assert digest(full.cuda(), word_bytes=unit) == digest(full, word_bytes=unit)
        held = part.view(full.view(-1))
        assert digest_part(held.cuda(), part, word_bytes=unit) == digest_part(held, part, word_bytes=unit)
