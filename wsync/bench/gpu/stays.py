"""Stays in phases, read from a ledger: what each one took of the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from wsync.memory.ledger import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """From entering a phase to leaving it. All in bytes of the device, of whatever process."""

    entered: int
    """Taken when the phase began."""

    peak: int
    """The most that was in use, without what the allocator keeps of freed tensors."""

    peak_cached: int
    """The most that was taken, with it."""


def stays_of(entries: Sequence[Entry], unused: int = 0) -> Mapping[str, Sequence[Stay]]:
    """Every stay of which the end was recorded, by phase, in the order of time. Ways between phases are none.

    What an engine in this process has unmapped counts as allocated and reserved all the same. It is the same at every
    event of a stay, so that it goes away in the difference to what the device says is taken.

    Args:
        entries: of the ledger of this process.
        unused: bytes that the allocator counts as kept and never uses: those of an engine's own pool.
    """
    found: dict[str, list[Stay]] = {}
    for phase, group in groupby(entries, key=lambda entry: entry.phase):
        events = list(group)
        if phase.startswith("to ") or len(events) < 2:
            continue
        begin, later = events[0].usage, [event.usage for event in events[1:]]
        # Contexts, and what the allocator does not count; less what it counts and is not there.
        beside = [usage.total - usage.free - (usage.reserved - unused) for usage in later]
        stay = Stay(
            entered=begin.total - begin.free,
            peak=max(more + usage.peak_allocated for more, usage in zip(beside, later, strict=True)),
            peak_cached=max(more + usage.peak_reserved - unused for more, usage in zip(beside, later, strict=True)),
        )
        found.setdefault(phase, []).append(stay)
    return found


def growth(stays: Sequence[Stay]) -> int:
    """Bytes by which later stays of one phase exceed the first, in what was there at the beginning or in the peak."""
    return max(max(values) - values[0] for values in ([stay.entered for stay in stays], [stay.peak for stay in stays]))
