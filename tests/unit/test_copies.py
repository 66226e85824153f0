"""Tables of copies against torch's own copies of views: same bytes, wherever the memories lie."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wsync.copies import Copies, copy_views
from wsync.regions import Region
from wsync.strided import memory_view
from wsync.tiles import MIN_BLOCK, TILE, Kind, Table, tables
from wsync.views import Pair, Place, Views

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CASTS = frozenset((a, b) for a in FLOATS for b in FLOATS if a != b)
MEMORY_BYTES = 1 << 17


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """A box of one matrix into a box of another, at any offset, of any two dtypes."""
    source_type, target_type = draw(st.sampled_from([*FLOATS, torch.int8])), draw(st.sampled_from(FLOATS))
    if source_type == torch.int8:
        target_type = torch.int8
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(0, 1500))
    places = []
    for dtype in (source_type, target_type):
        width = columns + draw(st.integers(0, 3))
        offset = draw(st.integers(0, 40))
        region = Region(offset, (rows, columns), (width, 1))
        places.append(Place(memory=draw(st.integers(0, 1)), dtype=dtype, region=region))
    return places[0], places[1]


def replay(found: dict[Kind, Table], sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """What the kernel does, row by row."""
    for kind, table in found.items():
        for source, start, target, place, count, *block in table.tolist():
            assert 0 < count <= TILE
            first, length, *steps = block or (0, count, 0, 0)
            at = torch.arange(first, first + count)
            froms, tos = (
                start_byte + (at // length * step + at % length) * dtype.itemsize
                for start_byte, step, dtype in zip((start, place), steps, (kind.source, kind.target), strict=True)
            )
            assert bool(block) is kind.in_blocks
            if kind.aligned:
                assert all(offset % 16 == 0 for offset in (start, place))
                assert steps[0] * kind.source.itemsize % 16 == steps[1] * kind.target.itemsize % 16 == 0
                assert not block or all(length * dtype.itemsize % 16 == 0 for dtype in (kind.source, kind.target))
            taken = sources[source][_bytes_at(froms, kind.source)].view(kind.source)
            targets[target][_bytes_at(tos, kind.target)] = taken.to(kind.target).view(torch.uint8)


def _bytes_at(starts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (starts[:, None] + torch.arange(dtype.itemsize)).reshape(-1)


@given(pairs(), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 99))
def test_rows_are_the_copy(pair: Pair, alignment: int, seed: int) -> None:
    sources = [torch.randint(0, 120, (MEMORY_BYTES,), dtype=torch.uint8, generator=rng(seed)) for _ in range(2)]
    targets = [torch.randint(0, 120, (MEMORY_BYTES,), dtype=torch.uint8, generator=rng(seed + 1)) for _ in range(2)]
    expected = [memory.clone() for memory in targets]
    copy_views([pair], sources, expected)
    found, others = tables([pair], CASTS, alignment)
    replay(dict(found), sources, targets)
    if others:
        assert pair[0].region.numel < MIN_BLOCK
        Copies(others).run(sources, targets)
    for got, wanted in zip(targets, expected, strict=True):
        assert torch.equal(got, wanted)
    assert all(kind.source.itemsize <= alignment for kind in found if kind.source == kind.target)


@given(st.lists(pairs(), max_size=6), st.integers(0, 99))
def test_copies_on_the_cpu_are_those_of_views(made: list[Pair], seed: int) -> None:
    sources = [torch.randint(0, 120, (MEMORY_BYTES,), dtype=torch.uint8, generator=rng(seed)) for _ in range(2)]
    targets = [torch.randint(0, 120, (MEMORY_BYTES,), dtype=torch.uint8, generator=rng(seed + 1)) for _ in range(2)]
    expected = [memory.clone() for memory in targets]
    for pair in made:  # one after the other: these may overlap
        copy_views([pair], sources, expected)
        Copies([pair]).run(sources, targets)
    for got, wanted in zip(targets, expected, strict=True):
        assert torch.equal(got, wanted)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Tensors, and the elements at which each of them begins in a buffer."""

    shapes: Sequence[tuple[int, ...]]
    starts: Sequence[int]
    types: tuple[torch.dtype, torch.dtype]
    """Of the tensors and of what is in the buffer."""

    def pairs(self, *, packs: bool) -> list[Pair]:
        made = []
        for number, (shape, start) in enumerate(zip(self.shapes, self.starts, strict=True)):
            region = Region.whole(shape)
            tensor = Place(memory=number, dtype=self.types[0], region=region)
            run = Place(memory=0, dtype=self.types[1], region=region.translate(start))
            made.append((tensor, run) if packs else (run, tensor))
        return made

    def memories(self, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        generator = rng(seed)
        tensors = [torch.randint(0, 99, shape, generator=generator).to(self.types[0]) for shape in self.shapes]
        nbytes = (sum(map(math.prod, self.shapes)) + 40 * len(self.shapes)) * self.types[1].itemsize
        return tensors, torch.randint(0, 60, (nbytes,), dtype=torch.uint8, generator=generator)


@st.composite
def wholes(draw: st.DrawFn) -> Whole:
    """Few different shapes, in any order in the buffer, evenly spaced or with gaps."""
    shapes = draw(st.lists(st.sampled_from([(3, 4), (12,), (2, 0), (), (5, 1, 7)]), min_size=1, max_size=12))
    even = draw(st.booleans())
    starts, end = [0] * len(shapes), draw(st.integers(0, 3))
    for number in draw(st.permutations(range(len(shapes)))):
        starts[number] = end
        end += 36 if even else math.prod(shapes[number]) + draw(st.integers(0, 4))
    kinds = draw(st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)))
    return Whole(shapes=shapes, starts=starts, types=kinds)


@given(wholes(), st.booleans(), st.integers(0, 99))
def test_whole_tensors_are_packed_and_loaded_as_by_views(whole: Whole, packs: bool, seed: int) -> None:
    made = whole.pairs(packs=packs)
    copies = Copies(made)
    for again in (seed, seed + 1):
        (tensors, buffer), (others, expected) = whole.memories(again), whole.memories(again)
        if packs:
            copies.run(tensors, [buffer])
            copy_views(made, others, [expected])
        else:
            copies.run([buffer], tensors)
            copy_views(made, [expected], others)
        assert torch.equal(buffer, expected)
        assert all(map(torch.equal, tensors, others))


def test_a_tensor_that_is_not_whole_or_has_gaps_is_copied_all_the_same() -> None:
    one = Whole(shapes=[(4, 3)] * 3, starts=[0, 12, 24], types=(torch.float32, torch.bfloat16))
    made, copies = one.pairs(packs=True), Copies(one.pairs(packs=True))
    _, buffer = one.memories(0)
    gaps = torch.arange(200.0).view(10, 20)[:4, :3]
    for sources in (
        [torch.arange(12.0) + number for number in range(3)],
        [torch.arange(12.0), torch.arange(50.0), torch.arange(13.0)],
        [torch.arange(12.0), gaps, torch.arange(12.0)],
    ):
        expected = buffer.clone()
        copy_views(made, sources, [expected])
        copies.run(sources, [buffer])
        assert torch.equal(buffer, expected)


def test_bytes_that_stand_for_another_dtype_are_not_converted() -> None:
    floats = [torch.arange(4, dtype=torch.uint8) + 48 + number for number in range(2)]
    pairs = [
        (
            Place(memory=number, dtype=torch.float8_e4m3fn, region=Region.span(0, 4)),
            Place(memory=0, dtype=torch.float8_e4m3fn, region=Region.span(4 * number, 4)),
        )
        for number in range(2)
    ]
    got = torch.zeros(8, dtype=torch.uint8)
    Copies(pairs).run(floats, [got])
    assert torch.equal(got, torch.cat(floats))


def test_nothing_beyond_a_memory_is_read() -> None:
    one = Whole(shapes=[(4, 3)] * 3, starts=[0, 12, 24], types=(torch.float32, torch.float32))
    _, buffer = one.memories(0)
    with pytest.raises(RuntimeError, match="out of bounds"):
        Copies(one.pairs(packs=True)).run([torch.zeros(12), torch.zeros(12), torch.zeros(11)], [buffer])


def test_tensors_whose_memory_shows_something_else_are_copied_as_they_show_it() -> None:
    shown = [torch.arange(3.0).to(torch.complex64).mul(1 + 2j).conj(), torch.arange(3.0).mul(1j).conj().imag]
    views = Views.of(shown)
    assert all(map(torch.equal, views, shown))
    got = torch.zeros(3, dtype=torch.complex64), torch.zeros(3)
    pairs = [
        (place, Place(memory=number, dtype=place.dtype, region=Region.span(0, 3)))
        for number, place in enumerate(views.places)
    ]
    Copies(pairs).run(views.memories, got)
    assert all(map(torch.equal, got, shown))


def test_a_large_tensor_is_cut_into_tiles_of_words() -> None:
    whole = Region.whole((3 * TILE + 5, 4))
    pair = (
        Place(memory=0, dtype=torch.bfloat16, region=whole),
        Place(memory=0, dtype=torch.bfloat16, region=whole.translate(8)),
    )
    found, others = tables([pair], CASTS, 16)
    assert not others
    [(kind, table)] = found.items()
    assert kind == Kind(source=torch.int64, target=torch.int64, aligned=True, in_blocks=False)
    assert table[:, 4].tolist() == [TILE, TILE, TILE, 5]
    assert np.array_equal(table[:, 3] - table[:, 1], np.full(4, 16))


def test_the_device_that_is_named_copies_whatever_else_is_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's list has memories of other devices, and empty ones, of which these copies name none."""
    ran: list[torch.device] = []

    class Kernel:
        def run(self, *args: object) -> None:
            """Nothing: there is no such device here."""

    def on_device(self: Copies, device: torch.device) -> Kernel:
        ran.append(device)
        return Kernel()

    monkeypatch.setattr(Copies, "_on_device", on_device)
    place, device = Place(memory=1, dtype=torch.float32, region=Region.span(0, 8)), torch.device("cuda", 1)
    memories = [torch.empty(0), torch.empty(8, device="meta")]
    Copies([(place, place)], device=device).run(memories, memories)
    assert ran == [device]


def test_short_runs_share_tiles() -> None:
    """As a rank's rows of a weight that the engine cuts by columns."""
    pair = (
        Place(memory=0, dtype=torch.float32, region=Region(0, (1792, 1792), (3584, 1))),
        Place(memory=0, dtype=torch.bfloat16, region=Region.whole((1792, 1792))),
    )
    found, others = tables([pair], CASTS, 16)
    assert not others
    [(kind, table)] = found.items()
    assert kind == Kind(source=torch.float32, target=torch.bfloat16, aligned=True, in_blocks=True)
    assert len(table) == 1792 * 1792 // TILE
    assert set(table[:, 4]) == {TILE}


def test_what_falls_into_small_pieces_is_left_to_torch() -> None:
    strides = (5000, 100, 3)
    pair = (
        Place(memory=0, dtype=torch.float32, region=Region(0, (40, 30, 20), strides)),
        Place(memory=0, dtype=torch.float32, region=Region(0, (40, 30, 20), (2400, 80, 4))),
    )
    assert tables([pair], CASTS, 16) == ({}, [pair])


def test_dtypes_that_the_kernel_does_not_convert_are_left_to_torch() -> None:
    pair = (
        Place(memory=0, dtype=torch.float32, region=Region.span(0, 4096)),
        Place(memory=0, dtype=torch.float8_e4m3fn, region=Region.span(0, 4096)),
    )
    found, others = tables([pair], CASTS, 16)
    assert not found
    assert list(others) == [pair]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    for source_type, target_type, offset in itertools.product(FLOATS, FLOATS, (0, 1, 3)):
        check_on_a_gpu(source_type, target_type, offset)


def check_on_a_gpu(source_type: torch.dtype, target_type: torch.dtype, offset: int) -> None:
    device = torch.device("cuda")
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 20,), dtype=torch.int32, device=device)
    source = bits.view(source_type)[offset:]
    made, at, to = [], 0, 0
    for rows, columns in [(3, 5000), (1, 4096 * 3 + 7), (200, 130), (700, 3), (0, 9), (64, 896), (3, 40_000)]:
        taken = Region(at, (rows, columns), (columns + offset, 1))
        put = Region(to, (rows, columns), (columns + offset % 3 * 8, 1))
        made.append((Place(memory=0, dtype=source_type, region=taken), Place(memory=0, dtype=target_type, region=put)))
        at, to = at + rows * (columns + offset), to + rows * (columns + offset % 3 * 8)
    copies = Copies(made)
    for _ in range(3):  # every time somewhere else
        target = torch.zeros(to + 8, dtype=target_type, device=device)
        copies.run([source], [target])
        for one, other in made:
            wanted = memory_view(source, one.region).to(target_type)
            got = memory_view(target, other.region).contiguous()
            assert torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8))
        source = source.clone()
