"""Between processes of any hosts: buckets are broadcast in a group of wsync's own, of one sender and its receivers.

    sender --welcome(slots, facts)----------> every receiver     control: one TCP link each
           --form(size)---------------------->
           <-post(key, value)---------------->                    what forms the group; the sender passes it on
           --commit(number, bucket, size)---->
           <--ready(number)------------------                    the size fits, the slot is free
           ===broadcast======================>                   data: the group
           <--release(number)----------------
           <--fail(message, traceback)

Nobody enters a broadcast before all have agreed on its size: a receiver whose buffer is too small would be aborted by
the backend. Each end has its slots, so that a bucket travels while the one before is loaded. On devices frames say that
work is queued, and events keep the order. Death of either side shows on the link at once, whatever the backend does
then; the next sender forms a group of its own.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist

from wsync.deadline import Deadline
from wsync.errors import PeerError, UnsupportedError
from wsync.protocols import Ticket
from wsync.topology import CPU, Topology
from wsync.transports.collective_group import Backend
from wsync.transports.collective_receiver import CollectiveReceiver, ReceivingEnd
from wsync.transports.collective_sender import CollectiveSender, SendingEnd
from wsync.transports.dial import is_loopback
from wsync.transports.gloo import GlooBackend
from wsync.transports.link import address_of
from wsync.transports.listener import Listener, connect, listen_at, new_ticket
from wsync.transports.nccl import NcclBackend
from wsync.transports.ring import Ring
from wsync.transports.slots import give_up


class CollectiveTransport:
    """Between processes of any hosts, over a backend of torch.distributed.

    Attributes:
        name: the backend: "gloo", "nccl" or "hccl".
        host: address of this host that the sender binds, and that receivers reach.
        in_turns: workers may have several senders, each with a group of its own. Its receivers are `SteppingReceiver`s.
    """

    by_reference = False
    in_turns = True

    def __init__(self, backend: str, host: str = "127.0.0.1") -> None:
        """Local. The default host is reached from this host only."""
        self.name, self.host = backend, host

    def refuse(self, topology: Topology) -> str | None:
        """See `wsync.Transport`."""
        backend = _BACKENDS.get(self.name)
        if backend is None:
            return _no_backend(self.name)
        if reason := backend.refuse(topology):
            return reason
        for worker in topology.receivers:
            near = (worker.host, worker.network) == (topology.sender.host, topology.sender.network)
            if not near and is_loopback(self.host):
                return (
                    f"a worker is {worker}, which cannot reach {self.host} of this host; pass transport="
                    f"wsync.transports.collective.CollectiveTransport({self.name!r}, host=<address that it reaches>)"
                )
        return None

    def sender(
        self, *, slot_bytes: int, num_slots: int, receivers: int, generation: int, device: torch.device = CPU
    ) -> CollectiveSender:
        """See `wsync.Transport`. Raises `UnsupportedError` if the weights are on no device of this backend."""
        backend = self._backend()
        facts = backend.facts(device)
        memory = backend.memory(slot_bytes, num_slots, device)
        sock = listen_at(f"[{self.host}]:0")
        ticket = new_ticket(self.name, address_of(sock.getsockname()), generation)
        end = SendingEnd(memory, Ring(slot_bytes, num_slots, receivers))
        return CollectiveSender(Listener(sock, ticket, receivers), self.host, backend, end, facts)

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> CollectiveReceiver:
        """See `wsync.Transport`. Returns when the sender has admitted it; the group forms meanwhile.

        Slots on a device are on the one that is current. Raises `ConfigError` if this process and the sender's differ
        in what their backend wants to be alike; the sender hears of it.
        """
        backend = self._backend()
        link, welcome = connect(ticket, index, deadline)
        try:
            match welcome.facts:
                case (int(slot_bytes), int(num_slots), *facts):
                    backend.compare(facts)
                    memory = backend.memory(slot_bytes, num_slots, None)
                case _:
                    raise PeerError("the sender did not say how large its slots are")
            return CollectiveReceiver(
                ReceivingEnd(link, memory, index + 1, lambda seat: partial(backend.form, seat, memory))
            )
        except BaseException as error:
            give_up(link, f"{type(error).__name__}: {error}")
            link.close()
            raise

    def _backend(self) -> Backend:
        if self.name not in _BACKENDS:
            raise UnsupportedError(_no_backend(self.name))
        return _BACKENDS[self.name]


class GlooTransport(CollectiveTransport):
    """Over gloo, for weights in host memory."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """See `CollectiveTransport`."""
        super().__init__("gloo", host)


class NcclTransport(CollectiveTransport):
    """Over NCCL, for weights on CUDA devices."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """See `CollectiveTransport`."""
        super().__init__("nccl", host)


class HcclTransport(CollectiveTransport):
    """Over HCCL, for weights on Ascend devices."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """See `CollectiveTransport`."""
        super().__init__("hccl", host)


_BACKENDS: Mapping[str, Backend] = {"gloo": GlooBackend(), "nccl": NcclBackend()}


def _no_backend(name: str) -> str:
    if not dist.is_backend_available(name):
        return f"this build of torch has no {name}"
    return f"broadcasts over {name} are not built yet"
