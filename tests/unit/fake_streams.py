"""Stands in for CUDA's streams and events, as far as slots on a device go: a log of what was queued, in order."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from wsync.topology import CPU


class Streams:
    """What was queued.

    Attributes:
        log: "stream: what", in the order of the host.
        current: name of the stream that is current.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "user"
        self.numbers: Iterator[int] = count()


def install(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Put it in the place of CUDA."""
    streams = Streams()

    class Event:
        def record(self, stream: Any) -> None:
            self.number = next(streams.numbers)
            streams.log.append(f"{stream.name}: record {self.number}")

    class Stream:
        device = CPU
        cuda_stream = 0

        def __init__(self, device: object = None, priority: int = 0, name: str = "moves") -> None:
            self.name = name

        def wait_event(self, event: Event) -> None:
            streams.log.append(f"{self.name}: wait {event.number}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(name=streams.current))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    return streams
