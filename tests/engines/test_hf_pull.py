"""Pull into a worker process that is killed or stopped, and what the engine says then."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import wsync
from tests.engines.hf_models import FAMILIES, PROMPTS, expected_tokens, seeded
from wsync.adapters.engines.hf import HFEngine
from wsync.deadline import Deadline
from wsync.errors import EngineStateError, PeerError, SyncTimeout, WsyncError

PULL = wsync.SyncConfig(path="pull", timeout_s=30.0)
llama = FAMILIES["llama"]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[HFEngine]:
    seeded(llama, 0).save_pretrained(tmp_path)
    with HFEngine.launch(tmp_path, timeout_s=60.0) as launched:
        yield launched


def signalled(engine: HFEngine, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker gets a signal when it has just been told to read."""
    begin = HFEngine.begin

    def begin_and_signal(self: HFEngine, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        assert self.pid is not None
        os.kill(self.pid, number)

    monkeypatch.setattr(HFEngine, "begin", begin_and_signal)


def test_tokens_are_those_of_transformers(engine: HFEngine) -> None:
    for seed in (1, 2, 3):
        actor = seeded(llama, seed)
        assert wsync.sync(actor, engine, config=PULL).pulled_nbytes > 0
        assert engine.generate(PROMPTS, max_new_tokens=12) == expected_tokens(actor)


def test_a_worker_that_is_killed_is_heard_of(engine: HFEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = seeded(llama, 1)
    with wsync.connect(actor, engine, config=PULL) as session:
        session.sync()
        signalled(engine, signal.SIGKILL, monkeypatch)
        with pytest.raises(PeerError, match="SIGKILL"):
            session.sync()
        with pytest.raises(WsyncError):
            engine.generate(PROMPTS, max_new_tokens=1)


def test_a_worker_that_was_stopped_publishes_nothing_and_is_taken_back(
    engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = seeded(llama, 1)
    with wsync.connect(actor, engine, config=replace(PULL, timeout_s=2.0)) as session:
        session.sync()
        assert engine.pid is not None
        with monkeypatch.context() as patch:
            signalled(engine, signal.SIGSTOP, patch)
            try:
                with pytest.raises(SyncTimeout, match="gave up after"):
                    session.sync()
            finally:
                os.kill(engine.pid, signal.SIGCONT)
        with pytest.raises(EngineStateError, match="no consistent version"):
            engine.version()
        assert engine._update is not None
        with torch.no_grad():
            for parameter in actor.parameters():
                parameter.mul_(1.5)
        with suppress(PeerError):  # it may have read everything before it heard that nobody waits
            engine._update.result(Deadline.after(30.0))
        with pytest.raises(EngineStateError, match="no consistent version"):
            engine.version()
        assert session.sync().version == 2
        assert engine.generate(PROMPTS, max_new_tokens=12) == expected_tokens(actor)
