"""Threads that are kept, and what goes wrong on them."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import torch

from wsync.background import Background
from wsync.deadline import Deadline

ROOT = Path(__file__).resolve().parents[2]


class Failing:
    def __call__(self) -> None:
        raise ValueError("no")


def test_a_call_that_failed_leaves_nothing_behind() -> None:
    failing = Failing()
    gone = weakref.ref(failing)
    gc.collect()
    gc.disable()
    try:
        call: Background[None] = Background("to fail", failing)
        with suppress(ValueError):
            call.result(Deadline.after(5))
        del call, failing
        assert Background("to go on", lambda: 5).result(Deadline.after(5)) == 5
        time.sleep(0.1)
        assert gone() is None
    finally:
        gc.enable()


def test_a_callback_may_wait_for_another_call() -> None:
    def nested() -> None:
        try:
            got.append(Background("inner", lambda: 5).result(Deadline.after(2)))
        except Exception as error:
            got.append(error)
        ended.set()

    got: list[object] = []
    ended, go = threading.Event(), threading.Event()
    call = Background("outer", lambda: go.wait(5))
    call.add_done_callback(nested)
    go.set()
    assert ended.wait(10)
    assert got == [5]


def test_a_callback_that_takes_long_delays_no_other_call() -> None:
    go, leave = threading.Event(), threading.Event()
    call = Background("outer", lambda: go.wait(5))
    call.add_done_callback(lambda: [leave.wait(3)].clear())
    go.set()
    while not call.done:
        time.sleep(0.01)
    began = time.monotonic()
    Background("other", lambda: 5).result(Deadline.after(10))
    leave.set()
    assert time.monotonic() - began < 1


NO_THREAD = """
import threading, time
import torch

from wsync.background import Background
def start(self):
    raise RuntimeError("can't start new thread")
threading.Thread.start = start
try:
    Background("a call", print)
except RuntimeError as error:
    print(error)
"""


def test_a_thread_that_could_not_start_delays_no_exit() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", NO_THREAD], cwd=ROOT, capture_output=True, text=True, timeout=60)
    took = time.monotonic() - began
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import wsync.background"], cwd=ROOT, timeout=60)
    assert done.stdout == "can't start new thread\n"
    assert took - (time.monotonic() - began) < 3


def test_a_call_finds_gradients_on_whatever_the_one_before_has_left() -> None:
    def switched_off() -> bool:
        torch.set_grad_enabled(False)
        return torch.is_grad_enabled()

    for _ in range(3):
        assert Background("a call", torch.is_grad_enabled).result(Deadline.after(10.0))
        assert not Background("a call that switches", switched_off).result(Deadline.after(10.0))
