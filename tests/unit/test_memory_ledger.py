"""The ledger: what it keeps, what it says, and what it makes of peaks."""

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from wsync.background import Background
from wsync.deadline import Deadline
from wsync.errors import ConfigError
from wsync.memory.device import Room, Usage
from wsync.memory.ledger import Ledger, PhasePeak

GIB = 1 << 30


class Meter:
    """A device that says what it was told to."""

    name = "cuda:0 (a meter)"

    def __init__(self) -> None:
        self.now = Usage(
            total=141 * GIB,
            free=141 * GIB,
            allocated=0,
            reserved=0,
            peak_allocated=0,
            peak_reserved=0,
            by_this_process=None,
            by_others=None,
            host_rss=5 * GIB,
            host_pinned=15 * GIB,
        )

    def take(
        self, allocated: int, reserved: int, by_this_process: int | None = None, others: int | None = None
    ) -> None:
        """In GiB. Peaks follow, as an allocator's do."""
        self.now = replace(
            self.now,
            free=(141 - reserved - (others or 0)) * GIB,
            allocated=allocated * GIB,
            reserved=reserved * GIB,
            peak_allocated=max(self.now.peak_allocated, allocated * GIB),
            peak_reserved=max(self.now.peak_reserved, reserved * GIB),
            by_this_process=None if by_this_process is None else by_this_process * GIB,
            by_others=None if others is None else others * GIB,
        )

    def describe(self) -> str:
        return self.name

    def room(self) -> Room:
        return self.now

    def usage(self) -> Usage:
        return self.now

    def reset_peak(self) -> None:
        self.now = replace(self.now, peak_allocated=self.now.allocated, peak_reserved=self.now.reserved)

    def empty_cache(self) -> None:
        raise AssertionError("a ledger only looks")


@pytest.fixture
def meter() -> Meter:
    return Meter()


def test_entries_say_when_and_what(meter: Meter) -> None:
    ledger, before = Ledger(meter), datetime.now(timezone.utc)
    residents = {"actor": 7 * GIB}
    first = ledger.record("rollout", "entered", residents)
    residents["actor"] = 0
    meter.take(3, 4)
    second = ledger.record("rollout", "left", {})
    assert ledger.entries() == (first, second)
    assert (first.phase, first.event, first.residents) == ("rollout", "entered", {"actor": 7 * GIB})
    assert (first.usage.allocated, second.usage.allocated) == (0, 3 * GIB)
    assert 0 <= first.seconds <= second.seconds
    at = datetime.fromisoformat(first.at)
    assert at.utcoffset() == timedelta(0)
    assert before - timedelta(seconds=1) <= at <= datetime.now(timezone.utc)


def test_old_entries_are_dropped_and_their_peaks_are_not(meter: Meter) -> None:
    ledger = Ledger(meter, max_entries=2)
    meter.take(9, 9)
    ledger.record("train", "entered", {})
    meter.take(1, 1)
    for number in range(3):
        ledger.record("rollout", str(number), {})
    assert [entry.event for entry in ledger.entries()] == ["1", "2"]
    assert ledger.to_json()["dropped_entries"] == 2
    assert ledger.peaks()["train"].allocated == 9 * GIB
    with pytest.raises(ConfigError, match="max_entries is 0"):
        Ledger(meter, max_entries=0)


def test_the_most_of_each_phase_and_how_often_it_began(meter: Meter) -> None:
    ledger = Ledger(meter)
    for phase, allocated, own in (("rollout", 8, None), ("train", 3, 5), ("train", 2, 7), ("rollout", 6, None)):
        meter.reset_peak()
        meter.take(allocated, allocated + 1, own)
        meter.reset_peak()
        ledger.record(phase, "an event", {})
    assert ledger.peaks() == {
        "rollout": PhasePeak(allocated=8 * GIB, reserved=9 * GIB, device=9 * GIB, entered=2),
        "train": PhasePeak(allocated=6 * GIB, reserved=7 * GIB, device=4 * GIB, by_this_process=7 * GIB, entered=1),
    }


def between(meter: Meter, ledger: Ledger, *, reset: bool) -> Mapping[str, PhasePeak]:
    """20 GiB for a moment of "train", 10 for a moment of "rollout"; the events see 1 and 2."""
    for phase, seen, in_between in (("train", 1, 20), ("rollout", 2, 10), ("end", 1, 1)):
        meter.take(seen, seen)
        ledger.record(phase, "entered", {})
        if reset:
            meter.reset_peak()
        meter.take(in_between, in_between)
    return ledger.peaks()


def test_what_happens_between_events_belongs_to_the_phase_before(meter: Meter) -> None:
    peaks = between(meter, Ledger(meter), reset=True)
    assert {phase: peak.allocated // GIB for phase, peak in peaks.items()} == {"train": 20, "rollout": 10, "end": 1}
    assert {phase: peak.reserved // GIB for phase, peak in peaks.items()} == {"train": 20, "rollout": 10, "end": 1}


def test_a_peak_that_nobody_resets_counts_once(meter: Meter) -> None:
    """Where it rose; the later, lower one cannot be seen."""
    peaks = between(meter, Ledger(meter), reset=False)
    assert {phase: peak.allocated // GIB for phase, peak in peaks.items()} == {"train": 20, "rollout": 2, "end": 1}


def test_a_peak_from_before_the_ledger_is_nobodys(meter: Meter) -> None:
    meter.take(50, 50)
    meter.take(1, 1)
    ledger = Ledger(meter)
    ledger.record("train", "entered", {})
    ledger.record("train", "left", {})
    assert ledger.peaks()["train"].allocated == GIB


def test_one_line_for_logs(meter: Meter) -> None:
    ledger = Ledger(meter)
    meter.take(14, 14)
    meter.take(12, 13, others=3)
    usage = (
        "allocated 12.0 GiB, reserved 13.0 GiB (peak 14.0 GiB), device 16.0 GiB of 141.0 GiB (others 3.0 GiB), "
        "host 5.0 GiB, pinned 15.0 GiB"
    )
    assert ledger.report_memory() == usage
    assert ledger.report_memory("step 3") == f"step 3: {usage}"
    ledger.record("rollout", "entered", {})
    assert ledger.report_memory() == f"rollout: {usage}"
    assert ledger.report_memory("step 3") == f"step 3 | rollout: {usage}"
    meter.take(1, 1)
    assert ledger.report_memory("x").startswith("x | rollout: allocated 1.0 GiB, reserved 1.0 GiB (peak 14.0 GiB)")
    assert "(others unknown)" in ledger.report_memory()


def test_the_table_has_a_row_for_each_phase(meter: Meter) -> None:
    ledger = Ledger(meter)
    assert ledger.table() == "phase  entered  allocated  reserved  device  process"
    meter.take(2, 3)
    ledger.record("actor update", "entered", {})
    meter.take(1, 1, 120)
    ledger.record("sync", "entered", {})
    assert ledger.table().splitlines() == [
        "phase         entered  allocated  reserved   device    process",
        "actor update        1    2.0 GiB   3.0 GiB  3.0 GiB    unknown",
        "sync                1    1.0 GiB   1.0 GiB  1.0 GiB  120.0 GiB",
    ]


def test_json_survives_a_file_and_names_its_units(meter: Meter, tmp_path: Path) -> None:
    ledger = Ledger(meter)
    meter.take(2, 3, 4, 5)
    ledger.record("sync", "entered", {"actor": 2 * GIB})
    ledger.write_json(tmp_path / "ledger.json")
    found = json.loads((tmp_path / "ledger.json").read_text(encoding="utf-8"))
    assert found == ledger.to_json()
    assert found["device"] == "cuda:0 (a meter)"
    assert found["dropped_entries"] == 0
    assert found["peaks"]["sync"] == {
        "allocated_bytes": 2 * GIB,
        "reserved_bytes": 3 * GIB,
        "device_bytes": 8 * GIB,
        "by_this_process_bytes": 4 * GIB,
        "entered": 1,
    }
    assert found["moves"] == []
    (row,) = found["entries"]
    assert row["residents_bytes"] == {"actor": 2 * GIB}
    assert (row["phase"], row["event"]) == ("sync", "entered")
    assert (row["total_bytes"], row["free_bytes"], row["by_others_bytes"]) == (141 * GIB, 133 * GIB, 5 * GIB)
    numbers = {key for key, value in row.items() if isinstance(value, int | float)}
    assert all(key == "seconds" or key.endswith("_bytes") for key in numbers)


def test_threads_measure_in_the_order_in_which_they_are_kept() -> None:
    measuring, second_measures = threading.Event(), threading.Event()
    overlapped = []

    class Slow(Meter):
        def usage(self) -> Usage:
            if measuring.is_set():
                second_measures.set()
            else:
                measuring.set()
                overlapped.append(second_measures.wait(0.2))
            return super().usage()

    ledger = Ledger(Slow())
    first = Background("first", lambda: ledger.record("first", "entered", {}))
    assert measuring.wait(20)
    second = Background("second", lambda: ledger.record("second", "entered", {}))
    entries = (first.result(Deadline.after(20)), second.result(Deadline.after(20)))
    assert overlapped == [False]
    assert ledger.entries() == entries
    assert entries[0].seconds <= entries[1].seconds
