"""Between processes of any hosts: buckets are broadcast in a process group of wsync's own, sender and receivers.

    sender --form(port of the store)-------> every receiver     control: one TCP link each
           --commit(number, bucket, size)-->
           <--ready(number)----------------                     the size fits, the slot is free
           ===broadcast===================>                     data: the group
           <--release(number)--------------
           <--fail(message, traceback)

Nobody enters a broadcast before all have agreed on its size: a receiver whose buffer is too small would be aborted by
the backend. Each end has its slots, so that a bucket travels while the one before is loaded. Death of either side shows
on the link at once, whatever the backend does then; the next sender forms a group of its own.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from wsync.deadline import Deadline
from wsync.errors import PeerError, TransportError
from wsync.protocols import Ticket
from wsync.topology import CPU, Topology
from wsync.transports.collective_group import Broadcast, gloo_broadcast, join_store
from wsync.transports.collective_receiver import CollectiveReceiver, ReceivingEnd
from wsync.transports.collective_sender import CollectiveSender, SendingEnd
from wsync.transports.dial import address_parts
from wsync.transports.link import address_of
from wsync.transports.listener import Listener, connect, listen_at, new_ticket
from wsync.transports.ring import Ring


class CollectiveTransport:
    """Between processes of any hosts, over a backend of torch.distributed.

    Attributes:
        name: the backend: "gloo", "nccl" or "hccl".
        host: address of this host that the sender binds, and that receivers reach.
    """

    by_reference = False

    def __init__(self, backend: str, host: str = "127.0.0.1") -> None:
        """Local. The default host is reached from this host only."""
        self.name, self.host = backend, host

    def refuse(self, topology: Topology) -> str | None:
        """See `wsync.Transport`."""
        if self.name not in _FORM:
            return _reason_against(self.name, topology)
        if not dist.is_available() or not dist.is_gloo_available():
            return "this build of torch has no gloo"
        for worker in topology.receivers:
            if worker.device != "cpu":
                return f"a worker is {worker}: its weights are not in host memory"
            near = (worker.host, worker.network) == (topology.sender.host, topology.sender.network)
            if not near and self.host in _LOOPBACK:
                return (
                    f"a worker is {worker}, which cannot reach {self.host} of this host; pass transport="
                    f"wsync.transports.collective.CollectiveTransport({self.name!r}, host=<address that it reaches>)"
                )
        return None

    def sender(
        self, *, slot_bytes: int, num_slots: int, receivers: int, generation: int, device: torch.device = CPU
    ) -> CollectiveSender:
        """See `wsync.Transport`."""
        slots = _allocate(slot_bytes, num_slots)
        sock = listen_at(f"[{self.host}]:0")
        ticket = new_ticket(self.name, address_of(sock.getsockname()), generation)
        end = SendingEnd(slots, Ring(slot_bytes, num_slots, receivers))
        return CollectiveSender(Listener(sock, ticket, receivers), self.host, _FORM[self.name], end)

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> CollectiveReceiver:
        """See `wsync.Transport`. Returns when the sender has admitted it; the group forms meanwhile."""
        link, welcome = connect(ticket, index, deadline)
        try:
            match welcome.facts:
                case (int(slot_bytes), int(num_slots)):
                    end = ReceivingEnd(link, _allocate(slot_bytes, num_slots))
                case _:
                    raise PeerError("the sender did not say how large its slots are")
            end.form = partial(_join, self.name, ticket.address, index + 1, link.host)
            return CollectiveReceiver(end)
        except BaseException:
            link.close()
            raise


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


def _join(backend: str, address: str, rank: int, host: str, port: int, size: int, timeout_s: float) -> Broadcast:
    store = join_store(address_parts(address)[0], port, timeout_s)
    return _FORM[backend](store, address, rank, size, host, timeout_s)


_FORM: dict[str, Callable[..., Broadcast]] = {"gloo": gloo_broadcast}
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _reason_against(backend: str, topology: Topology) -> str:
    """Why a backend that moves tensors between devices cannot serve."""
    present = dist.is_nccl_available() if backend == "nccl" else dist.is_backend_available(backend)
    if not present:
        return f"this build of torch has no {backend}"
    kind = {"nccl": "cuda", "hccl": "npu"}.get(backend, "")
    for end in (topology.sender, *topology.receivers):
        if end.device.partition(":")[0] != kind:
            return f"{backend} moves tensors between {kind} devices, and this is not one: {end}"
    return f"slots for {backend} would have to be on {kind} devices, where no producer fills them yet"


def _allocate(slot_bytes: int, num_slots: int) -> list[torch.Tensor]:
    try:
        return [torch.empty(slot_bytes, dtype=torch.uint8) for _ in range(num_slots)]
    except RuntimeError as error:
        raise TransportError(
            f"cannot allocate {num_slots} slots of {slot_bytes} bytes: {error}; lower bucket_bytes"
        ) from error
