"""The collective transport with a backend that is behind its host, as one on devices is: here gloo's own work objects.

What stands in for a device's stream is a slot that waits for its broadcast before it is read or written.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.contract.test_transports_collective import Poisoned
from wsync.deadline import Deadline
from wsync.errors import ConfigError, PeerError
from wsync.protocols import Receiver, Ticket
from wsync.testing.bench import Bench, expect
from wsync.testing.conformance import TRANSPORT_CHECKS
from wsync.testing.samples import plan_of, tiny_tensors
from wsync.topology import CPU
from wsync.transports.collective import CollectiveTransport
from wsync.transports.collective_group import Backend, Fact, Seat, allocate
from wsync.transports.gloo import BoardStore, GlooBackend
from wsync.transports.slots import SlotMemory


class LateSlots(SlotMemory):
    def __init__(self, slots: Sequence[torch.Tensor]) -> None:
        super().__init__(slots)
        self.work: dict[int, Any] = {}

    def before_write(self, slot: int) -> None:
        """A stream goes on after a broadcast that broke, too."""
        if slot in self.work:
            with suppress(RuntimeError):
                self.work[slot].wait()

    before_read = before_write


class LateGroup:
    """Its `start` does not wait."""

    def __init__(self, group: Any, memory: SlotMemory) -> None:
        assert isinstance(memory, LateSlots)
        self._group, self._memory = group, memory

    def start(self, slot: int, tensor: torch.Tensor) -> Callable[[], bool]:
        how = dist.BroadcastOptions()
        how.rootRank = 0
        self._memory.work[slot] = self._group.broadcast([tensor], how)
        return partial(_done, self._memory.work[slot])

    def close(self) -> None:
        self._memory.work.clear()


def _done(work: Any) -> bool:
    if work.is_completed():
        work.wait()  # raises what broke it
        return True
    return False


class LateBackend(GlooBackend):
    def __init__(self, word: str = "") -> None:
        self._word = word

    def facts(self, device: torch.device) -> Sequence[Fact]:
        return (self._word,)

    def compare(self, facts: Sequence[Fact]) -> None:
        if facts != [self._word]:
            raise ConfigError(f"the word is {self._word!r} here and {facts} at the sender")

    def memory(self, slot_bytes: int, num_slots: int, device: torch.device | None) -> SlotMemory:
        return LateSlots(allocate(slot_bytes, num_slots, CPU))

    def form(self, seat: Seat, memory: SlotMemory, check: Callable[[], None]) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=seat.here)]
        return LateGroup(gloo(BoardStore(seat, check), seat.rank, seat.size, options), memory)


class Late(CollectiveTransport):
    def __init__(self, word: str = "") -> None:
        super().__init__("gloo")
        self._word = word

    def receiver(self, ticket: Ticket, index: int, deadline: Deadline) -> Receiver:  # type: ignore[override]
        return Poisoned(super().receiver(ticket, index, deadline))

    def _backend(self) -> Backend:
        return LateBackend(self._word)


BENCHES = {
    "processes": Bench(make=Late, processes=True),
    "one receiver": Bench(make=Late, processes=True, receivers=1),
    "threads": Bench(make=Late, processes=False),
}


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES.keys())
def test_conformance(bench: Bench, check: Callable[[Bench], None]) -> None:
    check(bench)


def test_sides_that_differ_are_told_so_before_anything_moves() -> None:
    """Both sides: the receiver raises, and the sender hears why."""
    tensors = tiny_tensors(1, 10)
    plan = plan_of(tensors, 4096)
    bench = Bench(make=Late, processes=True)
    sender = Late("other").sender(slot_bytes=plan.capacity, num_slots=2, receivers=1, generation=1)
    with bench.consumer(sender, plan) as actor:
        with expect(PeerError, "receiver 0 failed: ConfigError: the word is '' here and ['other'] at the sender"):
            sender.accept(bench.deadline)
            bench.send(sender, plan, tensors)
        assert actor.hear("error")[0] == "ConfigError"
