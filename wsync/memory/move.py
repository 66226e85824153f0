"""What one step on the way to a phase did to the device, and what the same steps did over many ways."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from wsync.memory.sizes import gib
from wsync.memory.transition import Step

_HEADS = ("step", "times", "seconds", "freed", "of tensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What one step did to this rank's device."""

    phase: str
    """The one that was being entered."""

    step: Step
    seconds: float
    freed: int
    """Bytes that the device has more of than before; negative if it has less."""

    freed_tensors: int
    """The same of this process's tensors."""


def table(moves: Sequence[Move]) -> str:
    """Plain text: a row for each step that was taken, in the order in which it first was; medians, aligned."""
    by_step: dict[str, list[Move]] = {}
    for move in moves:
        by_step.setdefault(str(move.step), []).append(move)
    rows = [_HEADS, *(_cells(step, some) for step, some in by_step.items())]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows)


def _cells(step: str, moves: Sequence[Move]) -> tuple[str, ...]:
    return (
        step,
        str(len(moves)),
        f"{statistics.median(move.seconds for move in moves):.3f}",
        gib(statistics.median_low([move.freed for move in moves])),
        gib(statistics.median_low([move.freed_tensors for move in moves])),
    )
