"""Strided reads out of another process's memory, against the same copies by torch."""

import multiprocessing as mp
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from wsync.errors import PeerError, TransportError
from wsync.pull.host_reads import Foreign, HostReads, foreign_memories, read
from wsync.regions import Region
from wsync.strided import memory_view
from wsync.views import Place

TIMEOUT_S = 60.0


def owner(pipe: Connection) -> None:
    tensors = [torch.arange(5000, dtype=torch.float32), torch.randn(4000).to(torch.bfloat16)]
    pipe.send(([tensor.data_ptr() for tensor in tensors], [tensor.nbytes for tensor in tensors], tensors[1].float()))
    pipe.poll(TIMEOUT_S)


@pytest.fixture
def other() -> Iterator[tuple[Any, list[Foreign], list[torch.Tensor]]]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=owner, args=(theirs,), daemon=True)
    process.start()
    try:
        assert ours.poll(TIMEOUT_S)
        starts, sizes, second = ours.recv()
        tensors = [torch.arange(5000, dtype=torch.float32), second.to(torch.bfloat16)]
        yield process, foreign_memories(process.pid or 0, starts, sizes), tensors
    finally:
        process.kill()
        process.join()


def places(source: tuple[int, Region], target: Region, to: torch.dtype | None = None) -> tuple[Place, Place]:
    dtype = (torch.float32, torch.bfloat16)[source[0]]
    return (
        Place(memory=source[0], dtype=dtype, region=source[1]),
        Place(memory=0, dtype=to or dtype, region=target),
    )


CASES = [
    (0, Region.span(3, 4000), Region.span(0, 4000)),
    (0, Region(7, (50, 20), (60, 1)), Region.whole((50, 20))),
    (0, Region(0, (40, 30), (1, 40)), Region.whole((40, 30))),
    (0, Region(10, (20, 30), (100, 2)), Region(5, (20, 30), (90, 3))),
    (1, Region(1, (3000,), (1,)), Region.span(2, 3000)),
    (1, Region(0, (1500, 1), (2, 1)), Region(0, (1500, 1), (1, 1))),
    (0, Region(42, (), ()), Region(3, (), ())),
    (0, Region.span(0, 0), Region.span(0, 0)),
]


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize(("memory", "source", "target"), CASES)
def test_any_strides(other: Any, memory: int, source: Region, target: Region, cast: bool) -> None:
    _, foreign, tensors = other
    to = tensors[1 - memory].dtype if cast else tensors[memory].dtype
    found, expected = torch.zeros(8000, dtype=to), torch.zeros(8000, dtype=to)
    reads = HostReads([places((memory, source), target, to)], foreign)
    reads.run([found])
    memory_view(expected, target).copy_(memory_view(tensors[memory], source))
    assert torch.equal(found, expected)
    assert reads.nbytes == source.numel * tensors[memory].itemsize


def test_more_runs_than_one_call_takes(other: Any) -> None:
    _, foreign, tensors = other
    source, target = Region(0, (2500,), (2,)), Region(0, (2500,), (3,))
    found = torch.zeros(8000)
    HostReads([places((0, source), target)], foreign).run([found])
    assert torch.equal(found[: 3 * 2500 : 3], tensors[0][::2])


def test_this_process_is_read_as_any_other() -> None:
    tensor = torch.randn(100)
    [mine] = foreign_memories(os.getpid(), [tensor.data_ptr()], [tensor.nbytes])
    assert read(mine) == tensor.numpy().tobytes()


def test_a_process_that_is_gone_and_memory_that_is_not_there(other: Any) -> None:
    process, foreign, _ = other
    with pytest.raises(TransportError, match=r"cannot be read: Bad address"):
        read(Foreign(foreign[0].pid, 4096, 64))
    process.kill()
    process.join()
    with pytest.raises(PeerError, match=rf"process {foreign[0].pid}, whose memory is read, is gone"):
        read(foreign[0])
