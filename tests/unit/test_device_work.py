"""A worker answers while its device is still copying: who waits for it then, and what if it fails."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import wsync
from tests.unit.fake_engine import soon
from tests.unit.test_engine_worker import RealEngine
from tests.unit.toy_loader import ToyLoader, checkpoint
from tests.unit.worker_rig import TIMEOUT_S, Failed, assert_holds, rig
from wsync import worker as worker_module
from wsync.adapters.engines.hf import HFEngine
from wsync.adapters.trainers.module import ModuleProducer
from wsync.deadline import Deadline
from wsync.device_work import queued, wait_for
from wsync.errors import EngineStateError, PeerError, SyncTimeout, TransportError


class Device:
    """All of a worker's events. They happen when `done` is set, or not at all once it `failed`."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.failed = False
        self.streams: list[object] = []

    def make(self) -> "Device":
        return self

    def record(self, stream: object) -> None:
        self.streams.append(stream)

    def query(self) -> bool:
        if self.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.done.is_set()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(worker_module, "cuda_devices", lambda tensors: [torch.device("cuda", 3)])
    return device


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def waits(call: "Future[Any]", device: Device) -> Any:
    """What `call` comes to, which it must not do before the device is done."""
    with pytest.raises(FutureTimeout):
        call.result(0.2)
    device.done.set()
    return call.result(TIMEOUT_S)


def test_an_update_does_not_wait_for_the_device_and_publish_does(device: Device, pool: ThreadPoolExecutor) -> None:
    with rig() as r:
        r.attach(checkpoint(0))
        updating = r.update(1, "a")
        r.send(checkpoint(1))
        updating.result(TIMEOUT_S)
        assert device.streams == ["stream of cuda:3"]
        with pytest.raises(Failed, match=r"SyncTimeout: gave up after 0\.05 s: still waiting for cuda:3"):
            r.ask("publish", version=1, attempt="a", timeout_s=0.05)
        assert r.worker.state.kind == "loaded"
        assert waits(pool.submit(r.ask, "publish", version=1, attempt="a"), device)["version"] == 1
        assert_holds(r.loader, checkpoint(1))


def test_an_abort_waits_for_what_was_queued(device: Device, pool: ThreadPoolExecutor) -> None:
    with rig() as r:
        r.attach(checkpoint(0))
        updating = r.update(1, "a")
        r.send(checkpoint(1))
        updating.result(TIMEOUT_S)
        assert waits(pool.submit(r.ask, "abort", attempt="a"), device) == {"state": "torn"}
        device.failed = True
        assert r.ask("abort", attempt="a") == {"state": "torn"}, "a device that failed reads nothing"


class Spoiled(ToyLoader):
    """Queues everything and fails then."""

    def finish(self) -> None:
        raise ValueError("no")


def test_an_update_that_fails_waits_for_what_it_had_queued(device: Device) -> None:
    with rig(Spoiled()) as r:
        r.attach(checkpoint(0))
        updating = r.update(1, "a")
        with suppress(PeerError):
            r.send(checkpoint(1))
        with pytest.raises(Failed, match="ValueError: no"):
            waits(updating, device)
        assert device.streams == ["stream of cuda:3"]


@pytest.mark.parametrize("loader", [ToyLoader, Spoiled])
def test_a_device_that_fails_leaves_the_engine_torn_until_the_next_sync(
    device: Device, loader: Callable[[], ToyLoader]
) -> None:
    engine = RealEngine(loader())
    device.failed = True
    with pytest.raises(PeerError, match="illegal memory access" if loader is ToyLoader else "ValueError: no"):
        engine.take(1)
    if loader is Spoiled:
        engine.abort("attempt 1", "it failed", soon())
    with pytest.raises(EngineStateError, match="no consistent version"):
        engine.version()
    assert [worker.state.kind for worker in engine.workers] == ["torn"]
    device.failed = False
    device.done.set()
    if loader is ToyLoader:
        engine.take(2)
        assert engine.version() == 2
    engine.close_all()


class Served(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def generate(self, *args: object, **kwargs: object) -> None:
        raise AssertionError


def test_a_sync_returns_when_the_trainer_may_change_its_weights(device: Device, pool: ThreadPoolExecutor) -> None:
    actor, served = Served(), Served()
    with wsync.connect(actor, HFEngine(served), config=wsync.SyncConfig(timeout_s=TIMEOUT_S)) as session:
        assert waits(pool.submit(session.sync), device).version == 1


@pytest.mark.parametrize("fails", ["confirm", "digests"])
def test_a_sync_that_fails_raises_when_nothing_is_read_any_more(
    device: Device, pool: ThreadPoolExecutor, fails: str
) -> None:
    actor, served = Served(), Served()
    config = wsync.SyncConfig(timeout_s=TIMEOUT_S, verify="digest")
    with (
        wsync.connect(actor, HFEngine(served), config=config) as session,
        patch.object(ModuleProducer, fails, side_effect=TransportError("it broke")),
        pytest.raises(TransportError, match="it broke"),
    ):
        waits(pool.submit(session.sync), device)


def test_all_devices_are_waited_for(device: Device) -> None:
    devices = [torch.device("cuda", number) for number in range(2)]
    events = queued(devices)
    assert device.streams == ["stream of cuda:0", "stream of cuda:1"]
    device.done.set()
    wait_for(events, Deadline.after(TIMEOUT_S))
    never = Device()
    with pytest.raises(SyncTimeout, match="cuda:1"):
        wait_for([events[0], (devices[1], never)], Deadline.after(0.05))
