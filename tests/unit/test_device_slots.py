"""Slots on a device: which stream waits for which event."""

import pytest
import torch

from tests.unit import fake_streams
from wsync.topology import CPU
from wsync.transports.device_slots import DeviceSlots


def test_moves_and_uses_of_a_slot_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = fake_streams.install(monkeypatch)
    slots = DeviceSlots([torch.empty(8, dtype=torch.uint8) for _ in range(2)], CPU)
    assert streams.log == ["user: record 0", "user: record 1"], "memory may be in use until the stream that made it"
    streams.log.clear()
    slots.before_write(1)
    assert streams.log == [], "nobody has moved it yet"
    slots.after_write(1)
    slots.before_move(1)
    slots.after_move(1)
    streams.current = "another"
    slots.before_write(0)
    slots.before_write(1)
    assert streams.log == ["user: record 2", "moves: wait 2", "moves: record 3", "another: wait 3"]
    slots.after_write(1)
    slots.before_move(0)
    slots.before_move(1)
    assert streams.log[4:] == ["another: record 4", "moves: wait 0", "moves: wait 4"]


def test_a_receiver_s_slot_is_written_again_after_its_last_read(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = fake_streams.install(monkeypatch)
    slots = DeviceSlots([torch.empty(8, dtype=torch.uint8)], CPU)
    slots.before_move(0)
    slots.after_move(0)
    slots.before_read(0)
    slots.after_read(0)
    slots.before_move(0)
    assert streams.log == [
        "user: record 0",
        "moves: wait 0",
        "moves: record 1",
        "user: wait 1",
        "user: record 2",
        "moves: wait 2",
    ]
    slots.close()
    slots.before_read(0)
