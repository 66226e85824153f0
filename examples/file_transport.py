"""A transport of one's own: slots in a file without a name, in a folder that you choose, hugetlbfs for example.

    wsync.sync(actor, engine, config=wsync.SyncConfig(transport=FileTransport("/dev/hugepages")))

wsync brings the rest: `Listener` lets receivers in, `SlotSender` and `SlotReceiver` are the protocol over any memory.
What is missing is how the memory is made and how another process gets to it.
"""

import mmap
import os
from collections.abc import Sequence

import torch

from wsync.deadline import Deadline
from wsync.errors import PeerError, TransportError
from wsync.protocols import Ticket
from wsync.topology import CPU, Topology
from wsync.transports.listener import Listener, Welcome, connect, listen_here
from wsync.transports.ring import Ring
from wsync.transports.slots import SlotMemory, SlotReceiver, SlotSender

PAGE_BYTES = 2 << 20  # huge pages can be mapped as wholes only


class FileTransport:
    """Between processes of one host, weights of the receivers in host memory."""

    name = "file"
    by_reference = False

    def __init__(self, folder: str) -> None:
        """Receivers need no folder: they are handed the open file."""
        self.folder = folder

    def refuse(self, topology: Topology) -> str | None:
        """See `wsync.Transport`."""
        for worker in topology.receivers:
            if (worker.host, worker.network) != (topology.sender.host, topology.sender.network):
                return f"a worker is {worker}: not on this host"
            if worker.device != "cpu":
                return f"a worker is {worker}: its weights are not in host memory"
        return None

    def sender(
        self, *, slot_bytes: int, num_slots: int, receivers: int, generation: int, device: torch.device = CPU
    ) -> SlotSender:
        """See `wsync.Transport`."""
        try:
            fd = os.open(self.folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TransportError(f"cannot make a file in {self.folder}: {error}") from error
        try:
            os.ftruncate(fd, stride(slot_bytes) * num_slots)
            memory = SlotMemory(slots_in(fd, slot_bytes, num_slots))
            listener = Listener(*listen_here(self.name, generation), receivers)
        except BaseException:
            os.close(fd)
            raise
        welcome = Welcome(facts=(slot_bytes, num_slots), fd=fd)  # the sender closes it
        return SlotSender(listener, Ring(slot_bytes, num_slots, receivers), welcome, memory)

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> SlotReceiver:
        """See `wsync.Transport`."""
        link, welcome = connect(ticket, index, deadline)
        try:
            match welcome:
                case Welcome(facts=(int(slot_bytes), int(num_slots)), fd=int(fd)):
                    return SlotReceiver(link, SlotMemory(slots_in(fd, slot_bytes, num_slots)))
            raise PeerError("the sender gave no file")
        except BaseException:
            link.close()
            raise
        finally:
            if welcome.fd is not None:
                os.close(welcome.fd)


def slots_in(fd: int, slot_bytes: int, num_slots: int) -> Sequence[torch.Tensor]:
    """The slots of an open file: uint8 `[slot_bytes]` each. They keep the file's memory, not the descriptor."""
    try:
        mapping = mmap.mmap(fd, stride(slot_bytes) * num_slots)
    except OSError as error:
        raise TransportError(f"cannot map {num_slots} slots of {slot_bytes} bytes: {error}") from error
    return [
        torch.frombuffer(mapping, dtype=torch.uint8, count=slot_bytes, offset=index * stride(slot_bytes))
        for index in range(num_slots)
    ]


def stride(slot_bytes: int) -> int:
    """Bytes from one slot to the next."""
    return -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
