"""Calls that run while the caller goes on, and answers that come at the last moment."""

import itertools
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.unit.fake_engine import soon
from wsync.adapters.engines import hf_process
from wsync.background import Background
from wsync.errors import SyncTimeout

ROOT = Path(__file__).resolve().parents[2]

IN_THE_MIDDLE = """
import atexit, threading, torch
from wsync.background import Background

def work():
    go.wait(30)
    one = torch.randn(1500, 1500)
    for _ in range(4):
        one = torch.nn.functional.normalize(one @ one)
    print("ended", flush=True)

go = threading.Event()
Background("a long call", work)
atexit.register(go.set)  # runs before what was registered earlier
"""

HUNG = """
import threading
from wsync import background
background._EXIT_S = 0.2
background.Background("a peer that never answers", threading.Event().wait)
print("ended", flush=True)
"""


class LastMoment(Future[object]):
    """Is there just after somebody gave up waiting for it."""

    def result(self, timeout: float | None = None) -> object:
        if timeout is not None:
            self.set_result("there")
            raise TimeoutError
        return super().result()


def test_a_result_that_comes_with_the_end_of_the_wait_counts() -> None:
    call: Background[object] = Background("to answer", lambda: None)
    call._future = LastMoment()
    assert call.result(soon()) == "there"


def test_an_answer_of_the_worker_process_that_comes_with_the_end_of_the_wait_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hf_process, "Future", LastMoment)
    channel = object.__new__(hf_process._Channel)
    channel._name, channel._numbers, channel._outbox = "worker", itertools.count(), queue.SimpleQueue()
    channel._state, channel._waiting, channel._over = threading.Lock(), {}, None
    assert channel.ask("hello", {}, 20.0) == "there"


def test_a_timeout_of_the_call_itself_is_its_error_and_the_callers_is_another() -> None:
    def late() -> None:
        raise TimeoutError("the disk was slow")

    with pytest.raises(TimeoutError, match="the disk was slow"):
        Background("to answer", late).result(soon())
    release = threading.Event()
    call = Background("to answer", lambda: release.wait(30))
    with pytest.raises(SyncTimeout, match="still waiting for to answer"):
        call.result(soon(0.01))
    release.set()
    assert call.result(soon()) is True


@pytest.mark.parametrize("program", [IN_THE_MIDDLE, HUNG])
def test_the_end_of_the_process_waits_for_calls_but_not_for_ever(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
