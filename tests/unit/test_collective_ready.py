"""What a receiver of a collective says, by whichever of its threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from wsync.deadline import Deadline
from wsync.testing.samples import plan_of, tiny_tensors
from wsync.transports.collective_receiver import ReceivingEnd
from wsync.transports.slots import SlotMemory

PATIENCE_S = 30.0
SLOT_BYTES = 1 << 12


class Link:
    """Holds the first frame back until somebody else has had the time to send another one."""

    def __init__(self) -> None:
        self.sent: list[tuple[object, ...]] = []
        self.sending, self.go_on = threading.Event(), threading.Event()

    def send(self, frame: tuple[object, ...], deadline: Deadline) -> None:
        if not self.sending.is_set():
            self.sending.set()
            assert self.go_on.wait(PATIENCE_S)
        self.sent.append(frame)


class Moves:
    def put(self, number: int, slot: int, tensor: torch.Tensor) -> None:
        pass


def test_ready_is_said_in_order_whoever_says_it() -> None:
    """One thread listens, and the one that reads begins with the next plan: both find committed buckets."""
    plan = plan_of(tiny_tensors(1, 40), 4096)
    count = len(plan.buckets)
    assert count > 1
    link: Any = Link()
    memory = SlotMemory([torch.empty(SLOT_BYTES, dtype=torch.uint8) for _ in plan.buckets])
    end = ReceivingEnd(link, memory, 1, lambda seat: None)  # type: ignore[arg-type,return-value]
    moves: Any = Moves()
    end.plan, end.mover = plan, moves
    end.commits = [
        ("commit", number, plan.buckets[number].index, plan.buckets[number].nbytes)[1:] for number in range(count)
    ]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(end.agree)
        assert link.sending.wait(PATIENCE_S)
        begun = threading.Event()

        def second_thread() -> None:
            begun.set()
            end.agree()

        second = pool.submit(second_thread)
        assert begun.wait(PATIENCE_S)
        link.go_on.set()
        first.result(PATIENCE_S)
        second.result(PATIENCE_S)
    assert link.sent == [("ready", number) for number in range(count)]
