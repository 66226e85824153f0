"""A producer that leaves while another process has its memory mapped: killed, or in order in the middle of reads."""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import pytest
import torch

from tests.contract.arena import Arena, ArenaTransport
from wsync.deadline import Deadline
from wsync.errors import WsyncError
from wsync.plan import Plan
from wsync.protocols import Ticket
from wsync.testing.actors import Actor, MakeTransport
from wsync.testing.samples import digests_of, fill_slot, plan_of, random_tensor
from wsync.topology import CPU
from wsync.transports.cuda_ipc import CudaIpcTransport
from wsync.transports.shm import ShmTransport

TIMEOUT_S = 60.0
AT_ONCE_S = 10.0
READS = 20
"""Before it looks whether it shall go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How memory gets from the one to the other."""

    make: MakeTransport
    device: torch.device
    by_reference: bool
    """Whether the producer's own tensors are read, or else its slots."""


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda", 0)
ways = pytest.mark.parametrize(
    "way",
    [
        pytest.param(Way(make=ShmTransport, device=CPU, by_reference=False), id="shm slots"),
        pytest.param(Way(make=ArenaTransport, device=CPU, by_reference=True), id="arena references"),
        pytest.param(Way(make=CudaIpcTransport, device=CUDA, by_reference=False), id="cuda slots", marks=GPU),
        pytest.param(Way(make=CudaIpcTransport, device=CUDA, by_reference=True), id="cuda references", marks=GPU),
    ],
)


def after() -> Deadline:
    return Deadline.after(TIMEOUT_S)


def weights(way: Way) -> dict[str, torch.Tensor]:
    """Where the producer has them."""
    generator = torch.Generator().manual_seed(1)
    made = {f"w{rows}": random_tensor((rows, 1 << 18), torch.bfloat16, generator) for rows in (1, 5, 10)}
    if way.make is not ArenaTransport:
        return {name: tensor.to(way.device) for name, tensor in made.items()}
    arena = Arena(sum(tensor.nbytes for tensor in made.values()))
    return {name: arena.put(tensor) for name, tensor in made.items()}


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return digests_of({name: tensor.cpu() for name, tensor in tensors.items()})


def lend(pipe: Connection, way: Way) -> None:
    """Body of the producer: says "ticket" with (ticket, plan), "lent" with digests, "closed" when it was told to."""
    tensors = weights(way)
    plan = replace(plan_of(tensors, 16 << 20), in_place=way.by_reference)
    [bucket] = plan.buckets
    sender = way.make().sender(
        slot_bytes=plan.capacity, num_slots=int(not way.by_reference), receivers=1, generation=1, device=way.device
    )
    pipe.send(("ticket", (sender.ticket(), plan)))
    sender.accept(after())
    if way.by_reference:
        sender.hand_over(bucket, [tensors[meta.name] for meta in bucket.tensors])
    else:
        fill_slot(bucket, sender.acquire(after()), tensors)
        sender.commit(bucket)
    pipe.send(("lent", on_host(tensors)))
    pipe.recv()
    sender.close()
    pipe.send(("closed", None))
    pipe.recv()


def read(views: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor]) -> None:
    """On a device the reads are queued when this returns."""
    for _ in range(READS):
        for name, view in views.items():
            copies[name].copy_(view)


def borrow(pipe: Connection, way: Way, ticket: Ticket, plan: Plan) -> None:
    """Body of a reader: says "reading" and reads on and on until told, then "held", both with digests of what it sees.

    When told once more it asks for what comes next, and says "error" with (type, text, seconds). At last "well", with
    whether memory that it allocates now holds what is copied there.
    """
    receiver = way.make().receiver(ticket, 0, after())
    arrivals = receiver.buckets(plan, after())
    bucket, tensors = next(arrivals)
    views = {meta.name: tensor for meta, tensor in zip(bucket.tensors, tensors, strict=True)}
    copies = {name: torch.empty_like(view) for name, view in views.items()}
    read(views, copies)
    pipe.send(("reading", on_host(copies)))
    while not pipe.poll(0):
        read(views, copies)
    pipe.recv()
    read(views, copies)  # once more, whatever the producer has done
    pipe.send(("held", on_host(copies)))
    pipe.recv()
    began = time.monotonic()
    try:
        for _ in (*arrivals, *receiver.buckets(plan, after())):
            pass
    except WsyncError as error:
        pipe.send(("error", (type(error).__name__, str(error), time.monotonic() - began)))
    del tensors, views
    receiver.close()
    fresh = random_tensor((1 << 20,), torch.uint8, torch.Generator().manual_seed(2))
    pipe.send(("well", torch.equal(fresh.to(way.device).clone().cpu(), fresh)))


@contextmanager
def both(way: Way) -> Iterator[tuple[Actor, Actor, dict[str, str]]]:
    """A producer, a reader that has begun to read, and the digests of what it must see."""
    with Actor(True, TIMEOUT_S, lend, way) as producer:
        ticket, plan = producer.hear("ticket")
        with Actor(True, TIMEOUT_S, borrow, way, ticket, plan) as reader:
            lent = producer.hear("lent")
            assert reader.hear("reading") == lent
            yield producer, reader, lent


def hears_and_is_well(reader: Actor) -> None:
    reader.tell("ask")
    name, text, seconds = reader.hear("error")
    assert name == "PeerError", text
    assert "the sender" in text
    assert seconds < AT_ONCE_S
    assert reader.hear("well")


@ways
def test_a_producer_that_is_killed_is_heard_and_the_reader_s_device_works(way: Way) -> None:
    with both(way) as (producer, reader, lent):
        reader.tell("stop")
        assert reader.hear("held") == lent
        producer.signal(signal.SIGKILL)
        hears_and_is_well(reader)


@ways
def test_a_producer_that_closes_while_it_is_read_takes_no_reader_down(way: Way) -> None:
    with both(way) as (producer, reader, lent):
        producer.tell("close")
        producer.hear("closed")
        reader.tell("stop")
        seen = reader.hear("held")
        assert seen == lent or not way.by_reference  # slots are the sender's, and of no value once it is closed
        hears_and_is_well(reader)
