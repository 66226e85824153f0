"""Pull from device memory, on a stand-in for CUDA: what is exported, what is mapped where, and what is refused."""

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.unit.fake_cuda import UUIDS, Code, Runtime, host_view, install
from wsync import device_work
from wsync.deadline import Deadline
from wsync.errors import ProtocolError, TransportError
from wsync.plan import Plan, TensorSpec
from wsync.pull.device_reads import DeviceMemories
from wsync.pull.exports import Export, Exporter, Probed, Share, Shares
from wsync.pull.sources import unreadable
from wsync.regions import Region
from wsync.topology import Endpoint, local_endpoint
from wsync.transports.nothing import NoReceiver, NoSender
from wsync.transports.references import Segment
from wsync.views import Place

DEVICE = torch.device("cuda", 0)
NBYTES = 4096


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    yield install(monkeypatch)
    gc.collect()


def memory(cuda: Runtime, nbytes: int = NBYTES) -> torch.Tensor:
    code, address = cuda.cudaMalloc(nbytes)
    assert code == Code.cudaSuccess
    assert address is not None
    return host_view(address, nbytes)


def shares_of(*tensors: torch.Tensor) -> Shares:
    parts = tuple(
        Share(
            tensor=number,
            elements=Region.span(0, tensor.numel()),
            place=Place(memory=number, dtype=tensor.dtype, region=Region.span(0, tensor.numel())),
        )
        for number, tensor in enumerate(tensors)
    )
    return Shares(memories=tensors, parts=parts)


def other(endpoint: Endpoint, device: str = f"cuda:{UUIDS[0]}") -> Endpoint:
    return replace(endpoint, process="another", device=device)


def test_tensors_of_one_allocation_are_exported_as_one_segment(cuda: Runtime) -> None:
    first, second = memory(cuda), memory(cuda)
    shares = shares_of(first[16:32], first[64:128], second[:8])
    exporter = Exporter(3, DEVICE)
    export = exporter.export(shares)
    assert [segment.start for segment in export.segments] == [first.data_ptr(), second.data_ptr()]
    assert export.addresses == (first.data_ptr() + 16, first.data_ptr() + 64, second.data_ptr())
    assert export.sizes == (16, 64, 8)
    assert exporter.export(shares) is export


def test_memory_that_was_freed_and_given_out_again_is_exported_anew(cuda: Runtime) -> None:
    only = memory(cuda)
    exporter, shares = Exporter(0, DEVICE), shares_of(only)
    export = exporter.export(shares)
    cuda.ids[only.data_ptr()] += 1  # the same address
    again = exporter.export(shares)
    assert again is not export
    assert again.segments != export.segments


def test_memory_that_cannot_be_exported(cuda: Runtime) -> None:
    only = memory(cuda)
    cuda.refused["cudaIpcGetMemHandle"] = Code.cudaErrorNotSupported
    with pytest.raises(TransportError, match="expandable segments"):
        Exporter(0, DEVICE).export(shares_of(only))


def test_memories_are_mapped_on_the_device_that_reads(cuda: Runtime) -> None:
    here = local_endpoint(torch.device("cuda", 1))
    values = memory(cuda)
    values.copy_(torch.arange(NBYTES, dtype=torch.uint8))
    export = replace(Exporter(0, DEVICE).export(shares_of(values[8:24])), endpoint=other(local_endpoint(DEVICE)))
    memories = DeviceMemories([export], here, {0})
    assert cuda.opened_on == [1]
    [found] = memories._tensors
    assert torch.equal(found, values[8:24])
    del found
    memories.close()
    gc.collect()
    assert cuda.mapped == {}


def test_what_a_device_may_still_read_stays_mapped(cuda: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr(device_work, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(device_work, "_kept", kept)
    export = Exporter(0, DEVICE).export(shares_of(memory(cuda)))
    memories = DeviceMemories([replace(export, endpoint=other(local_endpoint(DEVICE)))], local_endpoint(DEVICE), {0})
    memories.reads([]).run([])
    cuda.is_done = lambda: False
    memories.close()
    gc.collect()
    assert len(cuda.mapped) == 1
    kept.clear()
    gc.collect()
    assert cuda.mapped == {}


def test_only_what_is_needed_is_mapped(cuda: Runtime) -> None:
    here, first, second = local_endpoint(DEVICE), memory(cuda), memory(cuda)
    exports = [
        replace(Exporter(rank, DEVICE).export(shares_of(tensor)), endpoint=other(local_endpoint(DEVICE)))
        for rank, tensor in enumerate((first, second))
    ]
    memories = DeviceMemories(exports, here, {1})
    assert list(cuda.mapped) == [second.data_ptr()]
    assert [tensor.numel() for tensor in memories._tensors] == [0, NBYTES]
    memories.close()


def test_memory_of_this_process_is_not_mapped(cuda: Runtime) -> None:
    values = memory(cuda)
    memories = DeviceMemories([Exporter(0, DEVICE).export(shares_of(values))], local_endpoint(DEVICE), {0})
    assert cuda.opened_on == []
    assert memories._tensors[0].data_ptr() == values.data_ptr()


def test_devices_that_cannot_read_each_other(cuda: Runtime) -> None:
    cuda.peers = False
    probed = Probed(2, DEVICE)
    probe = replace(probed.probe, endpoint=other(local_endpoint(DEVICE)))
    reason = unreadable([probe], local_endpoint(torch.device("cuda", 1)))
    assert "trainer rank 2 " in reason
    assert "there is no way between these devices" in reason


def test_a_rank_in_the_worker_s_process_with_another_device(cuda: Runtime) -> None:
    reason = unreadable([Probed(0, DEVICE).probe], local_endpoint(torch.device("cuda", 1)))
    assert "is this very process" in reason


@pytest.mark.parametrize("key", ["", "zz" * 64])
def test_a_handle_that_is_none(cuda: Runtime, key: str) -> None:
    endpoint = other(local_endpoint(DEVICE))
    bad = Export(
        rank=0, endpoint=endpoint, segments=(Segment(key, 4096, 64),), addresses=(4096,), sizes=(64,), parts=()
    )
    with pytest.raises(ProtocolError, match="handle"):
        DeviceMemories([bad], local_endpoint(DEVICE), {0})


def test_an_address_outside_of_all_segments(cuda: Runtime) -> None:
    values = memory(cuda)
    export = Exporter(0, DEVICE).export(shares_of(values))
    with pytest.raises(TransportError, match="in none of its allocations"):
        DeviceMemories([replace(export, sizes=(NBYTES + 1,))], local_endpoint(DEVICE), {0})


def test_where_nothing_travels_nothing_can_be_sent() -> None:
    deadline = Deadline.after(1.0)
    sender = NoSender(4)
    sender.accept(deadline)
    sender.drain(deadline)
    assert sender.ticket() is sender.ticket()
    assert sender.ticket().address != NoSender(4).ticket().address
    plan = Plan.pack([TensorSpec(name="w", shape=(8,), dtype=torch.float32)], 4096)
    with pytest.raises(ProtocolError, match="no slot"):
        sender.acquire(deadline)
    with pytest.raises(ProtocolError, match="cannot be sent"):
        sender.commit(plan.buckets[0])
    with pytest.raises(ProtocolError, match="1 buckets are expected"):
        NoReceiver().buckets(plan, deadline)
    assert list(NoReceiver().buckets(replace(plan, buckets=()), deadline)) == []


@pytest.mark.parametrize("segments", ["none", "too short"])
def test_memory_in_none_of_the_allocations_is_refused(cuda: Runtime, segments: str) -> None:
    values = memory(cuda)
    export = replace(Exporter(0, DEVICE).export(shares_of(values)), endpoint=other(local_endpoint(DEVICE)))
    [segment] = export.segments
    wrong = () if segments == "none" else (replace(segment, nbytes=NBYTES - 1),)
    with pytest.raises(TransportError, match="which is in none of its allocations"):
        DeviceMemories([replace(export, segments=wrong)], local_endpoint(DEVICE), {0})
