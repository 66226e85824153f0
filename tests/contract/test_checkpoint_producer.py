"""The producer of safetensors folders passes the producer kit, alone and on two ranks that share the reading."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.distributed_c10d import PrefixStore

from wsync.adapters.trainers.checkpoint import CheckpointProducer
from wsync.group import Group
from wsync.protocols import Producer
from wsync.testing.producer_conformance import PRODUCER_CHECKS, ProducerBench
from wsync.testing.ranks import Rank, run_ranks
from wsync.testing.samples import tensor_zoo

Tensors = Mapping[str, torch.Tensor]

_folders: dict[int, Path] = {}


def write(folder: Path, tensors: Tensors) -> None:
    """By the first rank; all wait for it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, folder / "next")
        (folder / "next").replace(folder / "model.safetensors")
    if dist.is_initialized():
        dist.barrier()


def make(tensors: Tensors) -> Producer:
    name = [tempfile.mkdtemp()]
    if dist.is_initialized():
        dist.broadcast_object_list(name)
    write(folder := Path(name[0]), tensors)
    producer = CheckpointProducer(folder)
    _folders[id(producer)] = folder
    return producer


def change(producer: Producer, tensors: Tensors) -> None:
    write(_folders[id(producer)], tensors)


def all_checks_on_a_rank(me: Rank, folder: str) -> list[int]:
    tempfile.tempdir = folder
    for check in PRODUCER_CHECKS:
        group = Group(me.rank, me.world_size, PrefixStore(check.__name__, me.store), 30.0)
        check(ProducerBench(make=make, change=change, group=group))
        group.close()
    return shares_of(me)


def shares_of(me: Rank) -> list[int]:
    """How many bytes of the checkpoint are this rank's to read, and how many there are."""
    group = Group(me.rank, me.world_size, PrefixStore("shares", me.store), 30.0)
    bench = ProducerBench(make=make, change=change, group=group)
    producer, plan = bench.prepared(tensor_zoo(0, 1 << 20), [0])
    assert isinstance(producer, CheckpointProducer)
    assert producer._plan is not None
    mine = [
        owner.region.numel * spec.dtype.itemsize
        for spec in producer._plan.specs
        for owner in spec.owners
        if owner.rank == me.rank
    ]
    group.close()
    return [sum(mine), plan.nbytes]


@pytest.mark.parametrize("check", PRODUCER_CHECKS, ids=lambda check: check.__name__)
def test_alone(check: Callable[[ProducerBench], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    check(ProducerBench(make=make, change=change, group=Group(0, 1, None, 5.0)))


def test_two_ranks_read_every_byte_once(tmp_path: Path) -> None:
    (first, total), (second, _) = run_ranks(all_checks_on_a_rank, 2, str(tmp_path), timeout_s=180)
    assert first + second == total
    assert abs(first - second) < 2 * 4096 * 4  # shares end at multiples of 4,096 elements
