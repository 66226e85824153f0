"""The transport over CUDA IPC where CUDA refuses something, on a stand-in for it."""

import gc
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tests.unit.fake_cuda import GIB, UUIDS, Code, Runtime, host_view, install
from tests.unit.toy_loader import ToyLoader, checkpoint, specs_of
from tests.unit.worker_rig import Failed, Rig
from wsync import device_work
from wsync.deadline import Deadline
from wsync.device import device_of
from wsync.errors import PeerError, TransportError
from wsync.plan import Plan, TensorSpec
from wsync.protocols import Receiver, Sender
from wsync.topology import Endpoint, Topology
from wsync.transports.cuda_ipc import CudaIpcTransport
from wsync.transports.device_memory import DeviceExporter

DEVICE = torch.device("cuda", 0)
TIMEOUT_S = 20.0
SLOT_BYTES = 4096
CURE = "share an IPC namespace"
READER_REFUSALS = [
    ("cudaIpcOpenMemHandle", "device memory cannot be mapped on cuda:0: cudaErrorMapBufferObjectFailed"),
    ("cudaIpcOpenEventHandle", "event cannot be opened: CUDA error: cudaErrorMapBufferObjectFailed"),
    ("cudaIpcGetEventHandle", "event cannot be exported from this process: CUDA error: cudaErrorMapBufferObjectFailed"),
]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    yield install(monkeypatch)
    gc.collect()  # what is released must find this runtime and not none


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def make_sender(slot_bytes: int = SLOT_BYTES) -> Sender:
    return CudaIpcTransport().sender(slot_bytes=slot_bytes, num_slots=2, receivers=1, generation=1, device=DEVICE)


def connecting(pool: ThreadPoolExecutor, sender: Sender) -> "Future[Receiver]":
    return pool.submit(CudaIpcTransport().receiver, sender.ticket(), 0, Deadline.after(TIMEOUT_S))


def message_of(connect: "Future[Receiver]") -> str:
    with pytest.raises(TransportError) as caught:
        connect.result(TIMEOUT_S)
    return str(caught.value)


def test_too_little_memory_says_what_was_free_and_needed(cuda: Runtime) -> None:
    cuda.free = 3 * SLOT_BYTES
    with pytest.raises(TransportError) as caught:
        make_sender(2 * SLOT_BYTES)
    assert f"2 slots of {2 * SLOT_BYTES} bytes need {4 * SLOT_BYTES} bytes on cuda:0; " in str(caught.value)
    assert f"{3 * SLOT_BYTES} of {2 * GIB} bytes were free (cudaErrorMemoryAllocation)" in str(caught.value)
    assert "lower bucket_bytes or num_slots, or let the engine sleep first" in str(caught.value)
    assert cuda.last == Code.cudaSuccess  # nobody else finds it later and takes it for an error of his own


def test_memory_that_torch_keeps_is_asked_for(cuda: Runtime) -> None:
    cuda.free, cuda.cached = SLOT_BYTES, 4 * SLOT_BYTES
    sender = make_sender(2 * SLOT_BYTES)
    assert list(cuda.allocated.values()) == [4 * SLOT_BYTES]
    sender.close()
    gc.collect()
    assert cuda.allocated == {}


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("cudaIpcGetMemHandle", "device memory cannot be exported from this process: cudaErrorNotSupported"),
        ("cudaIpcGetEventHandle", "an event cannot be exported from this process: CUDA error: cudaErrorNotSupported"),
    ],
)
def test_an_export_that_is_refused_says_so_and_keeps_nothing(cuda: Runtime, function: str, what: str) -> None:
    cuda.refused[function] = Code.cudaErrorNotSupported
    with pytest.raises(TransportError) as caught:
        make_sender()
    assert what in str(caught.value)
    assert CURE in str(caught.value)
    del caught
    gc.collect()
    assert cuda.allocated == {}


@pytest.mark.parametrize(("function", "what"), READER_REFUSALS)
def test_a_reader_that_is_refused_says_so_and_the_sender_hears_it(
    cuda: Runtime, pool: ThreadPoolExecutor, function: str, what: str
) -> None:
    sender = make_sender()
    cuda.refused[function] = Code.cudaErrorMapBufferObjectFailed
    connect = connecting(pool, sender)
    with pytest.raises(PeerError) as heard:
        sender.accept(Deadline.after(TIMEOUT_S))
    message = message_of(connect)
    sender.close()
    for said in (message, str(heard.value)):
        assert what in said
        assert CURE in said
    del connect, heard
    gc.collect()
    assert cuda.mapped == {}


def test_an_event_of_a_reader_that_the_sender_cannot_open(cuda: Runtime, pool: ThreadPoolExecutor) -> None:
    sender = make_sender()
    cuda.opens_events = 3  # the reader's share: one for each slot, one for what is handed over
    connect = connecting(pool, sender)
    with pytest.raises(TransportError, match="another process's event cannot be opened"):
        sender.accept(Deadline.after(TIMEOUT_S))
    sender.close()
    connect.result(TIMEOUT_S).close()


def test_a_device_that_the_reader_does_not_see(cuda: Runtime, pool: ThreadPoolExecutor) -> None:
    sender = make_sender()
    cuda.visible = [UUIDS[1]]
    connect = connecting(pool, sender)
    with pytest.raises(PeerError, match=f"device {UUIDS[0]} is not visible to this process"):
        sender.accept(Deadline.after(TIMEOUT_S))
    message = message_of(connect)
    sender.close()
    assert f"device {UUIDS[0]} is not visible to this process; it sees ['{UUIDS[1]}']" in message
    assert "CUDA_VISIBLE_DEVICES" in message
    assert cuda.opened_on == []


def test_a_reader_on_another_device_maps_slots_where_it_reads(cuda: Runtime, pool: ThreadPoolExecutor) -> None:
    sender = make_sender()
    cuda.current = 1
    connect = connecting(pool, sender)
    sender.accept(Deadline.after(TIMEOUT_S))
    assert cuda.opened_on == [1]
    sender.close()
    connect.result(TIMEOUT_S).close()


def test_a_reader_on_a_device_that_cannot_read_the_slots(cuda: Runtime, pool: ThreadPoolExecutor) -> None:
    sender = make_sender()
    cuda.current, cuda.peers = 1, False
    connect = connecting(pool, sender)
    with pytest.raises(PeerError, match="there is no way between these devices"):
        sender.accept(Deadline.after(TIMEOUT_S))
    assert "cuda:1 cannot read the memory of cuda:0" in message_of(connect)
    assert cuda.opened_on == []
    sender.close()


def test_the_same_device_at_another_index(cuda: Runtime, pool: ThreadPoolExecutor) -> None:
    sender = make_sender()
    cuda.visible.reverse()
    assert device_of(UUIDS[0]) == device_of(f"cuda:{UUIDS[0]}") == torch.device("cuda", 1)
    cuda.current = 1
    connect = connecting(pool, sender)
    sender.accept(Deadline.after(TIMEOUT_S))
    receiver = connect.result(TIMEOUT_S)
    assert cuda.opened_on == [1]  # a kernel that reads there faults on memory that was opened on another
    plan = Plan.pack(specs_of({"a": torch.empty(100)}), SLOT_BYTES)
    sender.acquire(Deadline.after(TIMEOUT_S))[:400].view(torch.float32).fill_(3.0)
    sender.commit(plan.buckets[0])
    for _, [tensor] in receiver.buckets(plan, Deadline.after(TIMEOUT_S)):
        assert torch.equal(tensor, torch.full((100,), 3.0))
    sender.drain(Deadline.after(TIMEOUT_S))
    receiver.close()
    sender.close()


def test_devices_are_compared_by_uuid() -> None:
    sender = Endpoint(host="h", network=1, process="a", pid=1, device=f"cuda:{UUIDS[0]}")
    for uuid, serves in ((UUIDS[0], True), (UUIDS[1], False)):
        worker = replace(sender, process="b", device=f"cuda:{uuid}")
        reason = CudaIpcTransport().refuse(Topology(sender=sender, receivers=(worker,)))
        assert (reason is None) is serves
        assert serves or (reason is not None and all(each in reason for each in UUIDS))


def test_an_engine_that_cannot_map_the_slots_serves_its_old_version(cuda: Runtime, pool: ThreadPoolExecutor) -> None:
    rig = Rig(ToyLoader())
    old, new = checkpoint(1), checkpoint(2)
    rig.attach(old)
    rig.sync(old, 1, "a")
    before = [parameter.clone() for parameter in rig.loader.model.parameters()]
    rig.close_sender()

    cuda.refused["cudaIpcOpenMemHandle"] = Code.cudaErrorMapBufferObjectFailed
    rig.sender = make_sender(rig.plan.capacity)
    order = {"plan": rig.plan, "first_index": 0, "timeout_s": TIMEOUT_S}
    attaching = pool.submit(rig.ask, "attach", tickets=[rig.sender.ticket()], **order)
    with pytest.raises(PeerError, match="cannot be mapped"):
        rig.sender.accept(Deadline.after(TIMEOUT_S))
    with pytest.raises(Failed, match="TransportError: another process's device memory cannot be mapped"):
        attaching.result(TIMEOUT_S)
    assert (rig.worker.state.kind, rig.worker.state.version) == ("serving", 1)
    assert all(map(torch.equal, before, rig.loader.model.parameters()))
    rig.close_sender()

    cuda.refused.clear()
    rig.sender = make_sender(rig.plan.capacity)
    attaching = pool.submit(rig.ask, "attach", tickets=[rig.sender.ticket()], **order)
    rig.sender.accept(Deadline.after(TIMEOUT_S))
    attaching.result(TIMEOUT_S)
    rig.sync(new, 2, "b")
    assert (rig.worker.state.kind, rig.worker.state.version) == ("serving", 2)
    assert not all(map(torch.equal, before, rig.loader.model.parameters()))
    rig.close()


def module_in(cuda: Runtime, nbytes: int) -> torch.Tensor:
    """Memory of the trainer, as torch's allocator has it from CUDA."""
    _, address = cuda.cudaMalloc(nbytes)
    assert address is not None
    return host_view(address, nbytes)


def test_tensors_are_read_where_the_trainer_has_them_and_mapped_once(cuda: Runtime, pool: ThreadPoolExecutor) -> None:
    memory = module_in(cuda, 4096)
    plan = replace(Plan.pack([TensorSpec(name="w", shape=(64,), dtype=torch.float32)], 4096), in_place=True)
    sender = CudaIpcTransport().sender(slot_bytes=0, num_slots=0, receivers=1, generation=1, device=DEVICE)
    assert sender.held_bytes == 0
    connect = connecting(pool, sender)
    sender.accept(Deadline.after(TIMEOUT_S))
    receiver = connect.result(TIMEOUT_S)

    def sync(weight: torch.Tensor) -> torch.Tensor:
        taken = pool.submit(
            lambda: [tensors[0].clone() for _, tensors in receiver.buckets(plan, Deadline.after(TIMEOUT_S))]
        )
        sender.hand_over(plan.buckets[0], [weight])
        sender.drain(Deadline.after(TIMEOUT_S))
        [found] = taken.result(TIMEOUT_S)
        return found

    weight = memory[256:512].view(torch.float32)
    for value in (1.0, 2.0):
        weight.fill_(value)
        assert sync(weight).eq(value).all()
    assert cuda.opened_on == [0], "opened once for two syncs"
    weight = memory[512:768].view(torch.float32).fill_(3.0)
    assert sync(weight).eq(3).all()
    assert cuda.opened_on == [0], "other tensors in the same allocation"
    cuda.ids[memory.data_ptr()] += 1  # freed, and another allocation put at the same address
    assert sync(weight).eq(3).all()
    assert cuda.opened_on == [0, 0], "another allocation is mapped anew"
    receiver.close()
    sender.close()
    gc.collect()
    assert cuda.mapped == {}


@pytest.mark.parametrize("num_slots", [0, 2])
def test_what_a_device_may_still_read_stays_mapped(
    cuda: Runtime, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, num_slots: int
) -> None:
    """It waits for a sender that is dead or stopped, say. To unmap it would end all that the device does."""
    kept: list[object] = []
    monkeypatch.setattr(device_work, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(device_work, "_kept", kept)
    plan = Plan.pack([TensorSpec(name="w", shape=(64,), dtype=torch.float32)], SLOT_BYTES)
    slot_bytes = SLOT_BYTES if num_slots else 0
    sender = CudaIpcTransport().sender(
        slot_bytes=slot_bytes, num_slots=num_slots, receivers=1, generation=1, device=DEVICE
    )
    connect = connecting(pool, sender)
    sender.accept(Deadline.after(TIMEOUT_S))
    receiver = connect.result(TIMEOUT_S)
    if num_slots:
        sender.acquire(Deadline.after(TIMEOUT_S))
        sender.commit(plan.buckets[0])
    else:
        plan = replace(plan, in_place=True)
        sender.hand_over(plan.buckets[0], [module_in(cuda, 4096)[:256].view(torch.float32)])
    buckets = receiver.buckets(plan, Deadline.after(TIMEOUT_S))
    next(buckets)  # the sender leaves before this is released, and what is queued on the device never ends
    cuda.is_done = lambda: False
    sender.close()
    receiver.close()
    del connect, receiver, buckets
    gc.collect()
    assert len(cuda.mapped) == 1
    kept.clear()
    gc.collect()
    assert cuda.mapped == {}


def test_memory_that_cannot_be_exported_is_a_reason_to_take_slots(cuda: Runtime) -> None:
    weight = module_in(cuda, 4096).view(torch.float32)
    assert DeviceExporter(DEVICE).segments([weight.data_ptr()])[0].nbytes == 4096
    cuda.refused["cudaIpcGetMemHandle"] = Code.cudaErrorInvalidValue
    with pytest.raises(TransportError, match=r"cannot be exported .*cudaErrorInvalidValue.*expandable segments"):
        DeviceExporter(DEVICE).segments([weight.data_ptr()])
    assert cuda.last == Code.cudaSuccess
    with pytest.raises(TransportError, match="cudaErrorInvalidValue"):
        DeviceExporter(DEVICE).segments([12])


def test_what_the_driver_has_no_number_for_is_never_taken_for_what_it_was(cuda: Runtime) -> None:
    memory = module_in(cuda, 4096)
    exporter = DeviceExporter(DEVICE)
    [segment] = exporter.segments([memory.data_ptr()])
    assert exporter.intact([segment])
    other = module_in(cuda, 4096)
    exporter.segments([other.data_ptr()])
    cuda.cudaFree(memory.data_ptr())
    assert not exporter.intact([segment])
