"""A worker on one end of a real transport, and its sender on the other."""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tests.unit.toy_loader import ToyLoader, specs_of
from wsync import registry, wire
from wsync.deadline import Deadline
from wsync.plan import Plan
from wsync.protocols import Sender
from wsync.state import State
from wsync.worker import Worker

TIMEOUT_S = 20.0
Message = Mapping[str, Any]


class Failed(Exception):
    """A worker's error reply."""


class Rig:
    """One worker, the sender it reads from, and a thread for its blocking calls."""

    def __init__(self, loader: ToyLoader, transport: str = "inproc", rank: int = 0) -> None:
        self.loader, self.transport = loader, transport
        self.states: list[State] = []
        self.worker = Worker(loader, rank=rank, on_state=self.states.append)
        self.pool = ThreadPoolExecutor(2)
        self.sender: Sender | None = None
        self.plan = Plan.pack([], 4096)

    def ask(self, method: str, **message: object) -> Message:
        reply = wire.unpack(self.worker.handle(method, wire.pack({"timeout_s": TIMEOUT_S, **message})))
        assert isinstance(reply, dict)
        if "error" in reply:
            assert set(reply["error"]) == {"type", "message", "traceback"}
            raise Failed(f"{reply['error']['type']}: {reply['error']['message']}")
        answer: Message = reply["ok"]
        return answer

    def attach(
        self,
        weights: Mapping[str, torch.Tensor],
        bucket_bytes: int = 1024,
        first_index: int = 0,
        optional: Collection[str] = (),
    ) -> None:
        self.close_sender()
        specs = [replace(spec, optional=spec.name in optional) for spec in specs_of(weights)]
        self.plan = Plan.pack(specs, bucket_bytes)
        chosen = registry.transport(self.transport)
        receivers = first_index + 1
        self.sender = chosen.sender(slot_bytes=self.plan.capacity, num_slots=2, receivers=receivers, generation=1)
        message = {"plan": self.plan, "tickets": [self.sender.ticket()], "first_index": 0, "timeout_s": TIMEOUT_S}
        asked = self.pool.submit(self.ask, "attach", **message)
        self.sender.accept(Deadline.after(TIMEOUT_S))
        asked.result(TIMEOUT_S)

    def update(self, version: int, attempt: str, *, digest: bool = False) -> "Future[Message]":
        message = {"version": version, "attempt": attempt, "timeout_s": TIMEOUT_S, "digest": digest}
        return self.pool.submit(self.ask, "update", **message)

    def send(self, weights: Mapping[str, torch.Tensor], count: int | None = None) -> None:
        assert self.sender is not None
        for bucket in self.plan.buckets[:count]:
            slot = self.sender.acquire(Deadline.after(TIMEOUT_S))
            for meta, view in bucket.views(slot):
                source = weights[meta.name]
                view.copy_(source if meta.is_whole else meta.elements.view(source.reshape(-1)))
            self.sender.commit(bucket)
        self.sender.drain(Deadline.after(TIMEOUT_S))

    def sync(self, weights: Mapping[str, torch.Tensor], version: int, attempt: str) -> Message:
        updating = self.update(version, attempt)
        self.send(weights)
        answer = updating.result(TIMEOUT_S)
        assert self.ask("publish", version=version, attempt=attempt)["version"] == version
        return answer

    def close_sender(self) -> None:
        if self.sender is not None:
            self.sender.close()

    def close(self) -> None:
        self.close_sender()
        self.ask("detach", address=None)
        self.pool.shutdown()


@contextmanager
def rig(loader: ToyLoader | None = None, transport: str = "inproc") -> Iterator[Rig]:
    made = Rig(loader or ToyLoader(), transport)
    try:
        yield made
    finally:
        made.close()


def assert_holds(loader: ToyLoader, weights: Mapping[str, torch.Tensor]) -> None:
    direct = type(loader)(loader.rank, loader.tp, loader.model.norm.dtype)
    direct.load_weights((name, tensor.clone()) for name, tensor in weights.items())
    for name, parameter in direct.model.named_parameters():
        assert torch.equal(parameter, loader.targets()[name]), name
