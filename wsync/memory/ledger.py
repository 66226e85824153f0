"""What device memory was taken when: measured at every event that a phase reports, and the most of each phase."""

import json
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from wsync.errors import ConfigError
from wsync.memory import move as moves_of
from wsync.memory.device import Device, Usage
from wsync.memory.move import Move
from wsync.memory.sizes import gib

_HEADS = ("phase", "entered", "allocated", "reserved", "device", "process")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event."""

    seconds: float
    """Since the ledger began; never goes back."""

    at: str
    """Wall time, ISO 8601, UTC."""

    phase: str
    event: str

    usage: Usage
    """Measured when it was recorded."""

    residents: Mapping[str, int]
    """Those that were present -> their bytes on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasePeak:
    """The most that was seen in one phase, in bytes."""

    allocated: int = 0
    reserved: int = 0

    device: int = 0
    """Taken of the device by anyone, at the events."""

    by_this_process: int | None = None
    """As the driver counts, at the events; None if it never said."""

    entered: int = 0
    """How often the phase began: events of it that came first of all, or after one of another phase."""


class Ledger:
    """Entries in the order of time. Any thread may use it.

    A phase lasts from an event of it to the next event of another one, what happens in between included.
    """

    def __init__(self, device: Device, *, max_entries: int = 10_000) -> None:
        """Args:
            device: what is measured.
            max_entries: kept, and as many moves; older ones are dropped. Peaks are kept for ever.

        Raises `ConfigError` if `max_entries` is below 1.
        """
        if max_entries < 1:
            raise ConfigError(f"max_entries is {max_entries}; a ledger keeps at least 1")
        self._device = device
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._entries: deque[Entry] = deque(maxlen=max_entries)
        self._recorded = 0
        self._peaks: dict[str, PhasePeak] = {}
        self._moves: deque[Move] = deque(maxlen=max_entries)

    def record(self, phase: str, event: str, residents: Mapping[str, int]) -> Entry:
        """Measure, and append what is found. `residents` are those that are present, with their bytes."""
        with self._lock:
            entry = Entry(
                seconds=time.monotonic() - self._began,
                at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                phase=phase,
                event=event,
                usage=self._device.usage(),
                residents=dict(residents),
            )
            self._count(self._entries[-1] if self._entries else None, entry)
            self._entries.append(entry)
            self._recorded += 1
        return entry

    def record_move(self, move: Move) -> None:
        """Append what a step of a way did."""
        with self._lock:
            self._moves.append(move)

    def moves(self) -> Sequence[Move]:
        """What each step of every way did, oldest first."""
        with self._lock:
            return tuple(self._moves)

    def entries(self) -> Sequence[Entry]:
        """Those that are kept, oldest first."""
        with self._lock:
            return tuple(self._entries)

    def peaks(self) -> Mapping[str, PhasePeak]:
        """Each phase, in the order in which they came first.

        `allocated` and `reserved` are what the events saw, and what the device's own peaks tell of the time between.
        These tell all of it if somebody calls `Device.reset_peak` after each event, and else only of what was more
        than ever before.
        """
        with self._lock:
            return dict(self._peaks)

    def report_memory(self, prefix: str = "") -> str:
        """Measure now. One line for logs, with the phase of the last entry:

        "step 3 | rollout: allocated 12.3 GiB, reserved 13.0 GiB (peak 14.1 GiB), device 20.1 GiB of 141.0 GiB (others
        3.2 GiB), host 5.1 GiB, pinned 15.2 GiB".
        """
        with self._lock:
            phase = self._entries[-1].phase if self._entries else ""
        usage = self._device.usage()
        others = "unknown" if usage.by_others is None else gib(usage.by_others)
        head = " | ".join(part for part in (prefix, phase) if part)
        return (
            f"{head}{': ' if head else ''}allocated {gib(usage.allocated)}, "
            f"reserved {gib(usage.reserved)} (peak {gib(usage.peak_reserved)}), "
            f"device {gib(usage.total - usage.free)} of {gib(usage.total)} (others {others}), "
            f"host {gib(usage.host_rss)}, pinned {gib(usage.host_pinned)}"
        )

    def table(self) -> str:
        """The peaks as plain text, a row for each phase below a row of heads; columns are aligned."""
        rows = [_HEADS, *(_cells(phase, peak) for phase, peak in self.peaks().items())]
        first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows)

    def moves_table(self) -> str:
        """What the steps between phases did, as plain text: how often, and medians of seconds and of bytes freed.

        "restore engine kv_cache" with -21.3 GiB: so much did that tag take.
        """
        return moves_of.table(self.moves())

    def to_json(self) -> dict[str, Any]:
        """All that is kept, as what `json.dumps` takes. Keys end in their unit."""
        with self._lock:
            entries, peaks, moves = list(self._entries), dict(self._peaks), list(self._moves)
            dropped = self._recorded - len(entries)
        return {
            "device": self._device.name,
            "entries": [_row(entry) for entry in entries],
            "dropped_entries": dropped,
            "peaks": {
                phase: {
                    "allocated_bytes": peak.allocated,
                    "reserved_bytes": peak.reserved,
                    "device_bytes": peak.device,
                    "by_this_process_bytes": peak.by_this_process,
                    "entered": peak.entered,
                }
                for phase, peak in peaks.items()
            },
            "moves": [
                {
                    "phase": move.phase,
                    "step": str(move.step),
                    "seconds": move.seconds,
                    "freed_bytes": move.freed,
                    "freed_tensors_bytes": move.freed_tensors,
                }
                for move in moves
            ],
        }

    def write_json(self, path: str | Path) -> None:
        """Write `to_json` to a file. Raises `OSError` if it cannot be written."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    def _count(self, last: Entry | None, entry: Entry) -> None:
        now = entry.usage
        begins = last is None or last.phase != entry.phase
        seen = PhasePeak(
            allocated=now.allocated,
            reserved=now.reserved,
            device=now.total - now.free,
            by_this_process=now.by_this_process,
            entered=int(begins),
        )
        self._raise(entry.phase, seen)
        if last is not None:
            # A mark that is where it was tells of the time before `last`. Any other is of the time since, whether
            # it has risen or somebody has reset it.
            before = last.usage
            allocated = now.peak_allocated if now.peak_allocated != before.peak_allocated else 0
            reserved = now.peak_reserved if now.peak_reserved != before.peak_reserved else 0
            self._raise(last.phase, PhasePeak(allocated=allocated, reserved=reserved))

    def _raise(self, phase: str, seen: PhasePeak) -> None:
        peak = self._peaks.get(phase, PhasePeak())
        known = [nbytes for nbytes in (peak.by_this_process, seen.by_this_process) if nbytes is not None]
        self._peaks[phase] = PhasePeak(
            allocated=max(peak.allocated, seen.allocated),
            reserved=max(peak.reserved, seen.reserved),
            device=max(peak.device, seen.device),
            by_this_process=max(known, default=None),
            entered=peak.entered + seen.entered,
        )


def _cells(phase: str, peak: PhasePeak) -> tuple[str, ...]:
    process = "unknown" if peak.by_this_process is None else gib(peak.by_this_process)
    return phase, str(peak.entered), gib(peak.allocated), gib(peak.reserved), gib(peak.device), process


def _row(entry: Entry) -> dict[str, Any]:
    return {
        "seconds": entry.seconds,
        "at": entry.at,
        "phase": entry.phase,
        "event": entry.event,
        **{f"{name}_bytes": nbytes for name, nbytes in asdict(entry.usage).items()},
        "residents_bytes": dict(entry.residents),
    }
