"""A `WorkerEngine` over real workers: what is left of a failed attempt on either side, and that the next sync works."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.unit.fake_engine import ERROR, FakeEngine, soon
from tests.unit.toy_loader import ToyLoader, checkpoint, specs_of
from tests.unit.worker_rig import assert_holds
from wsync import registry, wire
from wsync.errors import EngineStateError, PeerError, SyncTimeout
from wsync.plan import Plan
from wsync.protocols import Sender
from wsync.worker import Worker

PLAN = Plan.pack(specs_of(checkpoint(0)), 1024)


class RealEngine(FakeEngine):
    """Its workers are real; worker `spoiled` answers `publish` with an error instead of doing it."""

    def __init__(self, *loaders: ToyLoader) -> None:
        super().__init__()
        self.loaders = loaders
        self.workers = [Worker(loader, rank=rank) for rank, loader in enumerate(loaders)]
        self.senders: list[Sender] = []
        self.spoiled: int | None = None

    def call(self, method: str, payload: bytes, timeout_s: float | None) -> Sequence[bytes]:
        def answer(rank: int) -> bytes:
            if method == "publish" and rank == self.spoiled:
                return wire.pack({"error": ERROR})
            return self.workers[rank].handle(method, payload)

        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(answer, range(len(self.workers))))

    def connect(self) -> Sender:
        """A new sender with every worker attached to it."""
        self.describe(PLAN.specs, soon())
        sender = registry.transport("inproc").sender(
            slot_bytes=PLAN.capacity, num_slots=2, receivers=len(self.workers), generation=1
        )
        self.senders.append(sender)
        self.attach(PLAN, [sender.ticket()], 0, soon())
        sender.accept(soon())
        return sender

    def load(self, sender: Sender, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Everything up to `join`, which is left to the caller."""
        self.begin(version, f"attempt {version}", soon(), digest=False)
        for bucket in PLAN.buckets:
            slot = sender.acquire(soon())
            for meta, view in bucket.views(slot):
                view.copy_(meta.elements.view(weights[meta.name].reshape(-1)).view_as(view))
            sender.commit(bucket)
        sender.drain(soon())

    def take(self, version: int, sender: Sender | None = None) -> None:
        """A sync to the checkpoint whose seed is `version`."""
        self.load(sender or self.connect(), checkpoint(version), version)
        self.join(soon())
        self.finish(version, f"attempt {version}", soon())
        for loader in self.loaders:
            assert_holds(loader, checkpoint(version))

    def close_all(self) -> None:
        for sender in self.senders:
            sender.close()
        self.close()


@pytest.fixture
def pair() -> Iterator[RealEngine]:
    engine = RealEngine(ToyLoader(0, 2), ToyLoader(1, 2))
    yield engine
    engine.close_all()


class Stalling(ToyLoader):
    """Waits in `finish` until it may go on."""

    go_on: threading.Event

    def finish(self) -> None:
        assert self.go_on.wait(30)


def test_a_worker_that_wakes_up_after_it_was_given_up_takes_the_next_sync() -> None:
    loader = Stalling()
    loader.go_on = threading.Event()
    engine = RealEngine(loader)
    sender = engine.connect()
    engine.load(sender, checkpoint(1), 1)
    with pytest.raises(SyncTimeout):
        engine.join(soon(0.05))
    engine.abort("attempt 1", "the worker is stalled", soon(0.05))
    with pytest.raises(EngineStateError, match="not answered the previous sync"):
        engine.connect()
    loader.go_on.set()
    assert engine._update is not None
    engine._update.result(soon())
    assert engine.workers[0].state.kind == "loaded"
    engine.take(2)
    assert engine.version() == 2
    engine.close_all()


def test_a_version_that_one_of_two_workers_took_does_not_block_the_next_sync(pair: RealEngine) -> None:
    pair.take(1)
    pair.spoiled = 1
    with pytest.raises(PeerError):
        pair.take(2)
    assert [worker.state.kind for worker in pair.workers] == ["serving", "torn"]
    pair.spoiled = None
    pair.take(pair.last_version() + 1)
    assert pair.version() == 3


def test_closing_an_old_sender_leaves_the_workers_with_the_new_one(pair: RealEngine) -> None:
    old = pair.connect()
    pair.take(1, old)
    new = pair.connect()
    assert pair.attachment == new.ticket().address != old.ticket().address
    pair.close(old.ticket().address)
    pair.take(2, new)
    pair.close(new.ticket().address)
    pair.begin(3, "c", soon(), digest=False)
    with pytest.raises(PeerError, match="no sender is attached"):
        pair.join(soon())
    pair.abort("c", "not attached", soon())
    assert pair.version() == 2
