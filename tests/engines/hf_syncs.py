"""A sync of an engine by hand, so that a test can stop in the middle of it."""

from typing import Any

import torch

from wsync.adapters.engines.hf import HFEngine
from wsync.adapters.trainers.module import ModuleProducer
from wsync.background import Background
from wsync.deadline import Deadline
from wsync.engine import WorkerEngine
from wsync.errors import SyncTimeout
from wsync.plan import Plan
from wsync.protocols import Transport
from wsync.testing.samples import fill_slot


def soon(seconds: float = 60.0) -> Deadline:
    """A deadline that no healthy step meets."""
    return Deadline.after(seconds)


def endless(engine: HFEngine) -> Background[Any]:
    """A generation that is running, until something ends it."""
    prompts = [[3, 17, 42, 99, 5], [7, 1]]

    def start() -> Background[Any]:
        return Background("a generation", lambda: engine.generate(prompts, max_new_tokens=1_000_000, eos_token_id=None))

    running, deadline = start(), soon()
    while deadline.remaining("the generation to begin"):
        try:
            engine.pause("wait", soon(0.1))
        except SyncTimeout:
            return running
        engine.resume()
        if running.done:  # it came while the engine was paused, and was refused
            running = start()
    raise AssertionError


class HandSync:
    """The trainer's side, for models that lie in memory as in checkpoints: connected, and nothing sent yet."""

    def __init__(self, engine: WorkerEngine, model: torch.nn.Module, transport: Transport) -> None:
        self._tensors = {n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())}
        specs = ModuleProducer(model).metadata()
        [self.manifest] = engine.describe(specs, soon())
        assert self.manifest.problems == ()
        self.plan = Plan.pack(specs, 1 << 15)
        self.sender = transport.sender(slot_bytes=self.plan.capacity, num_slots=2, receivers=1, generation=1)
        ticket = self.sender.ticket()
        attaching = Background("attach", lambda: engine.attach(self.plan, [ticket], 0, soon()))
        self.sender.accept(soon())
        attaching.result(soon())

    def commit(self, count: int | None = None) -> None:
        """Send the first `count` buckets (default: all), and wait until they are loaded."""
        for bucket in self.plan.buckets[:count]:
            fill_slot(bucket, self.sender.acquire(soon()), self._tensors)
            self.sender.commit(bucket)
        self.sender.drain(soon())
