"""NCCL between GPUs passes the kit, survives the death of either side, and gives its memory back."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.contract.test_transports_collective import Poisoned
from wsync.deadline import Deadline
from wsync.errors import PeerError
from wsync.plan import Plan
from wsync.protocols import Receiver, Ticket
from wsync.testing.actors import Actor, produce
from wsync.testing.bench import Bench, expect
from wsync.testing.conformance import TRANSPORT_CHECKS
from wsync.testing.samples import fill_slot, plan_of, tiny_tensors
from wsync.transports.collective import NcclTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

GPUS = max(2, torch.cuda.device_count())
HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)
LARGE_BYTES = 512 << 20
EXTRA_BYTES = 32 << 20
SOON_S = 15.0


class Nccl(NcclTransport):
    """Receiver k is on device k + 1."""

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> Receiver:  # type: ignore[override]
        with torch.cuda.device(1 + index % (GPUS - 1)):
            return Poisoned(super().receiver(ticket, index, deadline))


BENCH = Bench(
    make=Nccl, processes=True, device=HERE, apart=True, receivers=min(2, GPUS - 1), timeout_s=30.0, short_s=3.0
)


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Bench], None]) -> None:
    check(BENCH)


def reduce_in_turn(pipe: Connection, store: str) -> None:
    """The trainer's other rank: one sum each time it is told."""
    torch.cuda.set_device(THERE)
    dist.init_process_group("nccl", init_method=store, rank=1, world_size=2)
    while pipe.recv() == "sum":
        pipe.send(("sum", total(2.0)))
    dist.destroy_process_group()


def total(value: float) -> float:
    number = torch.full((1 << 20,), value, device="cuda")
    dist.all_reduce(number)
    return float(number[-1])


@contextmanager
def trainer(folder: Path) -> Iterator[Callable[[], None]]:
    """A trainer's own NCCL group of this process and another. Gives what shows that it works."""
    store = f"file://{folder / 'store'}"
    with Actor(True, BENCH.timeout_s, reduce_in_turn, store) as other:
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=2)

        def works() -> None:
            other.tell("sum")
            assert total(1.0) == 3.0
            assert other.hear("sum") == 3.0

        try:
            works()
            yield works
            other.tell("end")
        finally:
            dist.destroy_process_group()


def large() -> tuple[dict[str, torch.Tensor], Plan]:
    """Four buckets of half a GiB, which take longer to travel than a process to end."""
    tensors = {"large": torch.ones(4 * LARGE_BYTES, dtype=torch.uint8, device=HERE)}
    return tensors, plan_of(tensors, LARGE_BYTES)


def test_a_receiver_that_is_killed_in_mid_broadcast_leaves_the_trainer_whole(tmp_path: Path) -> None:
    tensors, plan = large()
    with trainer(tmp_path) as works:
        for k in (0, 1):
            sender = Nccl().sender(slot_bytes=plan.capacity, num_slots=2, receivers=1, generation=1, device=HERE)
            with BENCH.consumer(sender, plan, kill_at=k):
                sender.accept(BENCH.deadline)
                started = time.monotonic()
                with expect(PeerError, "receiver 0"):
                    BENCH.send(sender, plan, tensors)
                sender.close()
                torch.cuda.synchronize(HERE)
                assert time.monotonic() - started < SOON_S
            works()
        BENCH.deliver(tiny_tensors(1, 20))
        works()


def test_a_sender_that_is_killed_in_mid_broadcast_leaves_the_receiver_whole() -> None:
    delivery = replace(BENCH.delivery(seed=1, leave_at=2, leave="kill"), bucket_bytes=LARGE_BYTES // 4)
    with Actor(True, BENCH.timeout_s, produce, NcclTransport, delivery) as actor:
        ticket, plan = actor.hear("ticket")
        receiver = Nccl().receiver(ticket, 0, BENCH.deadline)
        with expect(PeerError, "sender"):
            for _, views in receiver.buckets(plan, BENCH.deadline):
                assert views
        started = time.monotonic()
        receiver.close()
        torch.cuda.synchronize(THERE)
        assert time.monotonic() - started < SOON_S
    BENCH.deliver(tiny_tensors(2, 20))


def test_a_closed_sender_gives_the_communicator_s_memory_back(capsys: pytest.CaptureFixture[str]) -> None:
    tensors, plan = large()
    BENCH.deliver(tiny_tensors(3, 20))  # what the first communicator of a process takes for good
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(HERE)[0]
    sender = Nccl().sender(slot_bytes=plan.capacity, num_slots=2, receivers=1, generation=1, device=HERE)
    with BENCH.consumer(sender, plan) as actor:
        sender.accept(BENCH.deadline)
        for bucket in plan.buckets:
            fill_slot(bucket, sender.acquire(BENCH.deadline), tensors)
            sender.commit(bucket)
        sender.drain(BENCH.deadline)
        actor.hear("connected")
        taken = before - torch.cuda.mem_get_info(HERE)[0] - sender.held_bytes
        sender.close()
        patience = BENCH.deadline
        left = taken
        while left > EXTRA_BYTES and time.monotonic() < patience.expires:
            torch.cuda.empty_cache()
            left = before - torch.cuda.mem_get_info(HERE)[0]
        with capsys.disabled():
            print(f"\ncommunicator: {taken / 2**20:.0f} MiB on the sender's device; {left / 2**20:.0f} MiB after close")
        assert left <= EXTRA_BYTES
