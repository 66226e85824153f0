"""What a run of the PPO trainer left in its --log_dir: seconds by part, memory by phase and iteration."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from wsync.bench.gpu.stays import stays_of
from wsync.memory.device import Usage
from wsync.memory.ledger import Entry

PARTS = ("generate", "score", "train", "sync")
PHASES = ("rollout", "score", "train", "sync")
FIELDS = [field.name for field in fields(Usage)]


class PPOFacts:
    """Numbers of all iterations that ended, the first one first. Without a ledger there is nothing about memory."""

    def __init__(self, log_dir: Path) -> None:
        lines, ledger = log_dir / "metrics.jsonl", log_dir / "memory.json"
        found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
        self.iterations: list[Mapping[str, Any]] = [line for line in found if "seconds" in line]
        self.ledger: Mapping[str, Any] = json.loads(ledger.read_text()) if ledger.is_file() else {}
        rows: list[Mapping[str, Any]] = list(self.ledger.get("entries", ()))
        begins = [number for number, row in enumerate(rows) if row["phase"] == "to rollout" and row["event"] == "began"]
        self.rows_by_iteration = [rows[begin:end] for begin, end in pairwise(begins)]
        """Entries of the ledger, from one way to the engine to the next."""

    def median(self, name: str) -> float:
        """Of a number that the trainer logs."""
        return float(statistics.median(line[name] for line in self.iterations))

    @property
    def peaks(self) -> Mapping[str, Sequence[int]]:
        """Phase -> the most bytes of the device that were in use in it, iteration by iteration."""
        found: dict[str, list[int]] = {}
        for rows in self.rows_by_iteration:
            for phase, stays in stays_of([_entry(row) for row in rows]).items():
                found.setdefault(phase, []).append(max(stay.peak for stay in stays))
        return {phase: found[phase] for phase in PHASES if phase in found}

    @property
    def growth(self) -> int:
        """Bytes by which any phase's peak exceeds that of its second iteration, later."""
        later = [peaks[1:] for peaks in self.peaks.values() if len(peaks) > 1]
        return max((max(peaks) - peaks[0] for peaks in later), default=0)

    @property
    def seconds_moving(self) -> float:
        """Of a sync, the part that models and engine took to come and go: the median of all syncs."""
        moves = self.ledger.get("moves", ())
        around = groupby(moves, key=lambda move: move["phase"] in ("sync", "rollout"))
        return float(statistics.median([sum(move["seconds"] for move in some) for of_sync, some in around if of_sync]))

    def table(self) -> str:
        """For people."""
        whole = self.median("seconds")
        lines = [f"{len(self.iterations)} iterations of {whole:.2f} s (median)"]
        for part in PARTS:
            seconds = self.median(f"seconds_{part}")
            lines.append(f"  {part:<9}{seconds:8.3f} s {seconds / whole:7.2%}")
        if self.ledger:
            lines.append(f"  of the sync, models and engine came and went in {self.seconds_moving:.3f} s")
            lines.append(f"  and weights went from one to the other in {self.median('seconds_transfer'):.3f} s")
            lines.append(f"peak of the device, GiB{'first':>10}{'second':>10}{'most later':>12}")
        for phase, peaks in self.peaks.items():
            cells = [peaks[0], *(peaks[1:2] or [0]), max(peaks[2:], default=0)]
            lines.append(f"  {phase:<21}{cells[0] / 2**30:10.3f}{cells[1] / 2**30:10.3f}{cells[2] / 2**30:12.3f}")
        return "\n".join(lines)


def _entry(row: Mapping[str, Any]) -> Entry:
    """A row of `Ledger.to_json` as what it was made of."""
    usage = Usage(**{name: row[f"{name}_bytes"] for name in FIELDS})
    plain = {name: row[name] for name in ("seconds", "at", "phase", "event")}
    return Entry(**plain, usage=usage, residents=row["residents_bytes"])
