"""Processes of one host: slots in sealed shared memory, mapped and pre-faulted once, reused over syncs."""

import os
import sys

import torch

from wsync.deadline import Deadline
from wsync.errors import PeerError
from wsync.protocols import Ticket
from wsync.topology import CPU, Topology
from wsync.transports.listener import Listener, Welcome, connect, listen_here
from wsync.transports.memfd import create_slots, open_slots
from wsync.transports.ring import Ring
from wsync.transports.slots import SlotMemory, SlotReceiver, SlotSender


class ShmTransport:
    """Between processes of one host, weights of the receivers in host memory. Linux only."""

    name = "shm"
    by_reference = False

    def refuse(self, topology: Topology) -> str | None:
        """See `wsync.Transport`."""
        if sys.platform != "linux":
            return f"it needs Linux (memfd, abstract sockets); this is {sys.platform}"
        for worker in topology.receivers:
            if worker.host != topology.sender.host:
                return f"the trainer is {topology.sender}, a worker is {worker}: not one host"
            if worker.network != topology.sender.network:
                return (
                    f"the trainer ({topology.sender}, network namespace {topology.sender.network}) and a worker "
                    f"({worker}, network namespace {worker.network}) cannot reach each other's Unix sockets; run them "
                    f"in one container, or give both containers the same network"
                )
            if worker.device != "cpu":
                return f"a worker is {worker}: its weights are not in host memory"
        return None

    def sender(
        self, *, slot_bytes: int, num_slots: int, receivers: int, generation: int, device: torch.device = CPU
    ) -> SlotSender:
        """See `wsync.Transport`."""
        fd, slots = create_slots(slot_bytes, num_slots)
        try:
            listener = Listener(*listen_here(self.name, generation), receivers)
        except BaseException:
            os.close(fd)
            raise
        welcome = Welcome(facts=(slot_bytes, num_slots), fd=fd)
        return SlotSender(listener, Ring(slot_bytes, num_slots, receivers), welcome, SlotMemory(slots))

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> SlotReceiver:
        """See `wsync.Transport`. Returns when the sender's `accept` has admitted it and its slots are mapped."""
        link, welcome = connect(ticket, index, deadline)
        try:
            match welcome:
                case Welcome(facts=(int(slot_bytes), int(num_slots)), fd=int(fd)):
                    return SlotReceiver(link, SlotMemory(open_slots(fd, slot_bytes, num_slots)))
            raise PeerError("the sender gave no shared memory")
        except BaseException:
            link.close()
            raise
        finally:
            if welcome.fd is not None:
                os.close(welcome.fd)
