"""The gate between an engine's own program and syncs from elsewhere."""

import threading
from collections.abc import Callable
from functools import partial

import pytest

from wsync.background import Background
from wsync.deadline import Deadline
from wsync.errors import EngineStateError, SyncTimeout
from wsync.gate import Gate


def soon() -> Deadline:
    return Deadline.after(20)


class Program:
    """Uses a gate on a thread: enters when told, leaves when told."""

    def __init__(self, gate: Gate) -> None:
        self.inside, self._leave = threading.Event(), threading.Event()
        self._call = Background("a use", lambda: self._use(gate))

    def _use(self, gate: Gate) -> None:
        with gate.using():
            self.inside.set()
            assert self._leave.wait(20)

    def leave(self) -> None:
        assert self.inside.wait(20)
        self._leave.set()
        self._call.result(soon())


def test_a_sync_waits_for_a_use_and_the_next_use_for_the_sync() -> None:
    gate, trainer = Gate(), object()
    first = Program(gate)
    assert first.inside.wait(20)
    assert gate.shut(trainer) == 1
    with pytest.raises(SyncTimeout, match="the engine's own program"):
        gate.hold(trainer, 0, Deadline.after(0.05))
    second = Program(gate)
    first.leave()
    gate.hold(trainer, 0, soon())
    assert not second.inside.is_set()
    gate.open(trainer)
    second.leave()


def test_only_one_trainer_at_a_time() -> None:
    gate, trainer, other = Gate(), object(), object()
    gate.shut(trainer)
    with pytest.raises(EngineStateError, match="another trainer"):
        gate.shut(other)
    gate.open(other)
    assert gate.holds(trainer)
    gate.open(trainer)
    assert gate.shut(other) == 0


def test_a_wait_can_be_cancelled_by_its_trainer_only() -> None:
    gate, trainer = Gate(), object()
    program = Program(gate)
    assert program.inside.wait(20)
    gate.shut(trainer)
    waiting = Background("the hold", lambda: gate.hold(trainer, 0, soon()))
    gate.cancel(object())
    assert not waiting.done
    gate.cancel(trainer)
    with pytest.raises(EngineStateError, match="gave up"):
        waiting.result(soon())
    gate.open(trainer)
    program.leave()


def in_step(uses: int, gates: tuple[Gate, Gate], begun: Callable[[int, int], None]) -> list[Background[None]]:
    """Two parts of one replica: each use ends only when both are in it, as a collective does."""
    meeting = threading.Barrier(2)

    def part(index: int) -> None:
        for use in range(uses):
            with gates[index].using():
                begun(index, use)
                meeting.wait(20)

    return [Background(f"part {index}", partial(part, index)) for index in range(2)]


def test_parts_in_step_are_stopped_after_the_same_use() -> None:
    """Part 1 has entered use 0 and part 0 has not when the trainer comes: part 0 is let in, or both would hang."""
    gates, trainer = (Gate(), Gate()), object()
    ahead = threading.Event()
    uses: list[tuple[int, int]] = []

    def begun(index: int, use: int) -> None:
        uses.append((index, use))
        if index == 1:
            ahead.set()

    gates[0].shut(trainer)
    parts = in_step(3, gates, begun)
    assert ahead.wait(20)
    counts = [gate.shut(trainer) for gate in gates]
    assert counts == [0, 1]
    for gate in gates:
        gate.hold(trainer, max(counts), soon())
    assert sorted(uses) == [(0, 0), (1, 0)]
    for gate in gates:
        gate.open(trainer)
    for part in parts:
        part.result(soon())
    assert len(uses) == 6
