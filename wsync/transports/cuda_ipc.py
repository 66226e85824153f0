"""Processes that share a device: slots in device memory, or the trainer's own, mapped once by every receiver.

Frames say that work is queued; whether it is done, the device knows. The sender records an event when it has filled a
slot, which every receiver's stream waits for before it reads; each receiver records one when it has queued its last
read, which the sender's stream waits for before it writes again. No process waits for the device on the host.
"""

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import torch

from wsync.deadline import Deadline
from wsync.device import can_read, device_of, uuid_of
from wsync.device_work import Readers
from wsync.errors import PeerError, ProtocolError, TransportError, UnsupportedError
from wsync.protocols import Ticket
from wsync.topology import CPU, Topology
from wsync.traits import addresses
from wsync.transports.device_memory import (
    DeviceExporter,
    allocate,
    cut_slots,
    handle_bytes,
    memory_bytes,
    open_exported,
    refusals,
)
from wsync.transports.listener import Listener, Welcome, connect, listen_here
from wsync.transports.ring import Ring
from wsync.transports.slots import BY_REFERENCE, SlotMemory, SlotReceiver, SlotSender, give_up


class _Written(SlotMemory):
    """The sender's view."""

    def __init__(self, slots: Sequence[torch.Tensor], device: torch.device) -> None:
        super().__init__(slots)
        self._device = device
        self.filled = [_event() for _ in (*slots, BY_REFERENCE)]
        self._read: dict[int, Sequence[Any]] = {}

    def before_write(self, slot: int) -> None:
        stream = torch.cuda.current_stream(self._device)
        for events in self._read.values():
            stream.wait_event(events[slot])

    def after_write(self, slot: int) -> None:
        self.filled[slot].record(torch.cuda.current_stream(self._device))

    def absent(self, receivers: Collection[int]) -> list[int]:
        return sorted(set(receivers) - self._read.keys())

    def meet(self, receiver: int, facts: Sequence[object]) -> None:
        match facts:
            case (str(uuid), *events) if len(events) == len(self.filled):
                self._read[receiver] = [_opened(device_of(uuid), handle) for handle in events]
            case _:
                raise ProtocolError(
                    f"receiver {receiver} gave {facts}; it takes a device and {len(self.filled)} events"
                )


class _Read(SlotMemory):
    """A receiver's view: slots of the device `holder`, read by `device`."""

    def __init__(
        self, slots: Sequence[torch.Tensor], device: torch.device, holder: torch.device, filled: Sequence[object]
    ) -> None:
        super().__init__(slots)
        self._device, self._readers = device, Readers(device)
        self._filled = [_opened(holder, handle) for handle in filled]
        self.read = [_event() for _ in filled]

    def before_read(self, slot: int) -> None:
        self._readers.add_current()
        torch.cuda.current_stream(self._device).wait_event(self._filled[slot])

    def after_read(self, slot: int) -> None:
        self.read[slot].record(torch.cuda.current_stream(self._device))

    def release(self, memory: object) -> bool:
        return self._readers.release(memory)


class _Mapping:
    """Opens allocations of the sender for a receiver's device. See `wsync.transports.references.Importer`."""

    def __init__(self, device: torch.device, holder: torch.device) -> None:
        self._device, self._holder = device, holder

    def open(self, key: str, nbytes: int) -> torch.Tensor:
        return open_exported(self._device, handle_bytes(key), nbytes, holder=self._holder)


class CudaIpcTransport:
    """Between processes of one host whose weights are on the same device, or on devices that read each other."""

    name = "cuda_ipc"
    by_reference = False

    def refuse(self, topology: Topology) -> str | None:
        """See `wsync.Transport`."""
        if sys.platform != "linux":
            return f"it needs Linux (abstract sockets); this is {sys.platform}"
        sender = topology.sender
        for worker in topology.receivers:
            if (worker.host, worker.network) != (sender.host, sender.network):
                return f"the trainer is {sender}, a worker is {worker}: not one host and network namespace"
            if worker.process == sender.process:
                return f"a worker is in the trainer's process ({worker}): device memory is shared between processes"
            if not worker.device.startswith("cuda:"):
                return f"a worker is {worker}: its weights are not on a CUDA device"
            if reason := _reason_apart(sender.device, worker.device):
                return f"the trainer's weights are on {sender.device}, a worker's on {worker.device}{reason}"
        return None

    def refuse_references(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """See `wsync.Transport`. What torch's allocator gave can be exported unless its segments are expandable."""
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1 or not tensors[0].is_cuda:
            return f"the trainer's weights are on {sorted(map(str, devices))}: not on one CUDA device"
        try:
            DeviceExporter(tensors[0].device).segments([start for start in addresses(tensors) if start])
        except TransportError as error:
            return str(error)
        return None

    def sender(
        self, *, slot_bytes: int, num_slots: int, receivers: int, generation: int, device: torch.device = CPU
    ) -> SlotSender:
        """See `wsync.Transport`.

        Raises:
            UnsupportedError: the weights are not on a CUDA device.
            TransportError: too little memory, or nothing can be exported from this process.
        """
        if device.type != "cuda":
            raise UnsupportedError(f"cuda_ipc shares slots on a CUDA device; the trainer's weights are on {device}")
        handle, memory = allocate(device, slot_bytes, num_slots) if num_slots else (b"", None)
        slots = () if memory is None else cut_slots(memory, slot_bytes, num_slots)
        with torch.cuda.device(device):
            written = _Written(slots, device)
            events = [_exported(event) for event in written.filled]
        uuid = uuid_of(device)
        welcome = Welcome(facts=(uuid, handle.hex(), slot_bytes, *events))
        listener = Listener(*listen_here(self.name, generation), receivers)
        return SlotSender(listener, Ring(slot_bytes, num_slots, receivers), welcome, written, DeviceExporter(device))

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> SlotReceiver:
        """See `wsync.Transport`. Slots are mapped for torch's current device.

        Raises `TransportError` if the sender's is not visible, or the memory cannot be mapped. The sender hears of it.
        """
        link, welcome = connect(ticket, index, deadline)
        try:
            device = torch.device("cuda", torch.cuda.current_device())
            match welcome.facts:
                case (str(uuid), str(handle), int(slot_bytes), *events) if events:
                    holder = device_of(uuid)
                case _:
                    raise PeerError("the sender gave no device memory")
            num_slots = len(events) - 1  # the last one is for what is handed over
            slots: Sequence[torch.Tensor] = ()
            if num_slots:
                nbytes = memory_bytes(slot_bytes, num_slots)
                shared = open_exported(device, handle_bytes(handle), nbytes, holder=holder)
                slots = cut_slots(shared, slot_bytes, num_slots)
            mine = uuid_of(device)
            with torch.cuda.device(device):
                memory = _Read(slots, device, holder, events)
                with suppress(PeerError):  # it has left already: the first bucket will say so
                    link.send(("slots", mine, *map(_exported, memory.read)), deadline)
            return SlotReceiver(link, memory, _Mapping(device, holder))
        except BaseException as error:
            give_up(link, f"{type(error).__name__}: {error}")
            link.close()
            raise


def _reason_apart(holder: str, reader: str) -> str:
    """Why one device cannot read the memory of the other; "" if it can."""
    if reader == holder:
        return ""
    if not holder.startswith("cuda:"):
        return ": only memory of a CUDA device can be shared"
    try:
        return "" if can_read(reader, holder) else ", which cannot read it"
    except TransportError as error:
        return f": {error}"


def _event() -> Any:
    """An event that has happened: recorded once, so that whoever waits for it first need not know that it is new."""
    make: Any = torch.cuda.Event
    event = make(interprocess=True)
    event.record()
    return event


def _exported(event: Any) -> str:
    with refusals("an event cannot be exported from this process"):
        handle: bytes = event.ipc_handle()
    return handle.hex()


def _opened(device: torch.device, handle: object) -> Any:
    events: Any = torch.cuda.Event
    raw = handle_bytes(handle)
    with refusals("another process's event cannot be opened"):
        return events.from_ipc_handle(device, raw)
