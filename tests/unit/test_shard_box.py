"""Shards from mesh coordinates, by arithmetic: compared with torch's own chunking, and covering every element once."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from wsync.adapters.trainers.fsdp import shard_box
from wsync.errors import UnsupportedError
from wsync.regions import Region, uncovered


def cut(full: torch.Tensor, box_of: tuple[tuple[int, ...], tuple[int, ...]]) -> list[int]:
    starts, sizes = box_of
    return Region.box(full.shape, starts, sizes).view(full.reshape(-1)).reshape(-1).tolist()


def chunk(tensor: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    """What torch gives to one rank of a sharded dim: ceil-sized chunks, none for the ranks that are left over."""
    chunks = tensor.chunk(count, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.data(),
)
def test_plain_shards_cut_in_order_like_torch(shape: list[int], mesh: list[int], data: st.DataObject) -> None:
    dims = [data.draw(st.integers(-1, len(shape) - 1)) for _ in mesh]
    placements: list[Placement] = [Replicate() if dim < 0 else Shard(dim) for dim in dims]
    full = torch.arange(math.prod(shape)).reshape(shape)
    for coordinate in itertools.product(*(range(size) for size in mesh)):
        expected = full
        for dim, count, index in zip(dims, mesh, coordinate, strict=True):
            expected = expected if dim < 0 else chunk(expected, dim, count, index)
        box_of = shard_box("w", shape, mesh, coordinate, placements)
        assert cut(full, box_of) == expected.reshape(-1).tolist()


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_a_strided_shard_cuts_after_the_later_axes(rows: int, data: int, expert: int, tensor: int) -> None:
    """FSDP2 cuts what expert and tensor parallelism have left to this rank, though its axis comes first."""
    placements: list[Placement] = [_StridedShard(0, split_factor=expert * tensor), Shard(0), Shard(0)]
    mesh = (data, expert, tensor)
    full = torch.arange(rows * 2).reshape(rows, 2)
    regions = []
    for coordinate in itertools.product(*(range(size) for size in mesh)):
        local = chunk(chunk(full, 0, expert, coordinate[1]), 0, tensor, coordinate[2])
        box_of = shard_box("w", full.shape, mesh, coordinate, placements)
        assert cut(full, box_of) == chunk(local, 0, data, coordinate[0]).reshape(-1).tolist()
        regions.append(Region.box(full.shape, *box_of))
    assert not uncovered(regions, full.numel())
    assert sum(region.numel for region in regions) == full.numel()


def test_the_example_of_the_torch_documentation() -> None:
    placements: list[Placement] = [_StridedShard(0, split_factor=2), Shard(0)]
    rows = {xy: shard_box("w", (8, 8), (2, 2), xy, placements)[0][0] for xy in itertools.product(range(2), range(2))}
    assert rows == {(0, 0): 0, (0, 1): 4, (1, 0): 2, (1, 1): 6}


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        ((Partial(), Shard(0)), r"layer\.weight is Partial\(sum\) on mesh axis 0; only shards and replicas"),
        ((_StridedShard(0, split_factor=3), Shard(0)), r"layer\.weight: mesh axis 0 .* split factor should be 2"),
        ((_StridedShard(0, split_factor=2), Shard(1)), r"split factor should be 1, .* dim 0"),
        ((Shard(0), _StridedShard(0, split_factor=2)), r"mesh axis 1 .* split factor should be 1"),
    ],
)
def test_what_is_no_plain_cut_is_refused_by_name(placements: tuple[Placement, ...], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        shard_box("layer.weight", (8, 8), (2, 2), (0, 0), placements)
