"""`sync_async` on another thread than the caller's, whose streams it does not have."""

import asyncio
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import wsync
from wsync import api


class Net(nn.Linear):
    """Taken for a model that generates."""

    def __init__(self) -> None:
        super().__init__(8, 4)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self(x)
        return out


def test_what_the_caller_has_queued_comes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has streams of its own: it waits for an event of the caller's."""
    said: list[tuple[str, object, int]] = []
    actor, engine = Net(), Net()

    def queued(devices: Sequence[torch.device]) -> object:
        said.append(("queued", tuple(devices), threading.get_ident()))
        return "events"

    monkeypatch.setattr(api, "queued", queued)
    monkeypatch.setattr(api, "order_after", lambda events: said.append(("behind", events, threading.get_ident())))
    monkeypatch.setattr(api, "_used_devices", lambda: [torch.device("cuda", 3)])
    asyncio.run(wsync.sync_async(actor, engine))
    assert torch.equal(actor.weight, engine.weight)
    (first, devices, caller), (second, events, thread) = said
    assert (first, devices, second, events) == ("queued", (torch.device("cuda", 3),), "behind", "events")
    assert caller == threading.get_ident() != thread
