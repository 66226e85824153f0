"""The embedded engine in a worker process: the same answers, real weights over shared memory, any kind of death."""

import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import wsync
from tests.engines.hf_models import FAMILIES, PROMPTS, expected_tokens, llama, seeded
from tests.engines.hf_syncs import HandSync, endless, soon
from wsync.adapters.engines.hf import HFEngine
from wsync.adapters.trainers.module import ModuleProducer
from wsync.errors import (
    ClosedError,
    ConfigError,
    EngineStateError,
    PeerError,
    SyncTimeout,
    UnsupportedError,
)
from wsync.transports.shm import ShmTransport

TIMEOUT_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models on a busy machine; the worker inherits it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    seeded(llama, 1).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def shared_engine(folder: Path) -> Iterator[HFEngine]:
    with HFEngine.launch(folder, timeout_s=TIMEOUT_S) as engine:
        yield engine


@pytest.fixture
def engine(folder: Path) -> Iterator[HFEngine]:
    with HFEngine.launch(folder, timeout_s=TIMEOUT_S) as engine:
        yield engine


class Pid:
    """Sees the end of a process that need not be a child of this one."""

    def __init__(self, pid: int | None) -> None:
        assert pid is not None
        self._descriptor = os.pidfd_open(pid)

    def ended(self, timeout_s: float) -> bool:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(timeout_s * 1000))

    def close(self) -> None:
        os.close(self._descriptor)


@contextmanager
def watched(pid: int | None) -> Iterator[Pid]:
    process = Pid(pid)
    try:
        yield process
    finally:
        process.close()


def send(engine: HFEngine, number: signal.Signals) -> None:
    assert engine.pid is not None
    os.kill(engine.pid, number)


# The same answers as in this process. These tests share one worker and leave it serving.


def test_it_is_another_process_with_the_checkpoint(shared_engine: HFEngine) -> None:
    assert shared_engine.pid not in (None, os.getpid())
    [endpoint] = shared_engine.endpoints()
    assert (endpoint.pid, endpoint.device) == (shared_engine.pid, "cpu")
    assert shared_engine.version() == 0
    assert shared_engine.generate(PROMPTS, max_new_tokens=12) == expected_tokens(seeded(llama, 1))


def test_options_travel_and_errors_come_back(shared_engine: HFEngine) -> None:
    [row] = shared_engine.generate([[3, 17, 42]], max_new_tokens=6)
    [cut] = shared_engine.generate([[3, 17, 42]], max_new_tokens=6, eos_token_id=[row[2], 4])
    assert cut == row[: row.index(row[2]) + 1]
    with pytest.raises(PeerError, match="no_such_option") as caught:
        shared_engine.generate(PROMPTS, max_new_tokens=1, no_such_option=1)
    assert "hf_model.py" in caught.value.remote_traceback
    with pytest.raises(UnsupportedError, match="cannot be sent"):
        shared_engine.generate(PROMPTS, max_new_tokens=1, stopping_criteria=[object()])
    shared_engine.pause("wait", soon())
    shared_engine.resume()


def test_three_syncs_over_shared_memory(shared_engine: HFEngine) -> None:
    actor = seeded(llama, 2)
    with wsync.connect(actor, shared_engine, config=wsync.SyncConfig(bucket_bytes=1 << 14)) as session:
        assert "verified" in session.explain()
        for _ in range(3):
            report = session.sync()
            assert (report.transport, shared_engine.version()) == ("shm", report.version)
            assert shared_engine.generate(PROMPTS, max_new_tokens=12) == expected_tokens(actor)
            with torch.no_grad():
                for parameter in actor.parameters():
                    parameter.mul_(1.5)
    assert shared_engine.version() == 3, "the engine outlives the session"


def test_a_generation_runs_while_it_is_told_to_stop(shared_engine: HFEngine) -> None:
    running = endless(shared_engine)
    assert not running.done
    shared_engine.pause("abort", soon())
    assert all(len(row) >= 1 for row in running.result(soon()))
    shared_engine.resume()
    assert [len(row) for row in shared_engine.generate(PROMPTS, max_new_tokens=5, eos_token_id=None)] == [5, 5, 5]


def test_sleep_and_wake(shared_engine: HFEngine) -> None:
    before = shared_engine.generate(PROMPTS, max_new_tokens=12)
    shared_engine.sleep(1)
    with pytest.raises(EngineStateError, match="asleep"):
        shared_engine.generate(PROMPTS, max_new_tokens=1)
    shared_engine.wake_up()
    assert shared_engine.generate(PROMPTS, max_new_tokens=12) == before
    shared_engine.sleep(2)
    shared_engine.wake_up()
    with pytest.raises(EngineStateError, match="level-2"):
        shared_engine.generate(PROMPTS, max_new_tokens=1)
    actor = seeded(llama, 3)
    wsync.sync(actor, shared_engine)
    assert shared_engine.generate(PROMPTS, max_new_tokens=12) == expected_tokens(actor)


def test_a_stopped_worker_is_given_up_at_the_deadline_and_taken_back(shared_engine: HFEngine) -> None:
    actor = seeded(llama, 4)
    attempt = HandSync(shared_engine, actor, ShmTransport())
    version = shared_engine.version() + 1
    send(shared_engine, signal.SIGSTOP)
    try:
        with pytest.raises(SyncTimeout, match=r"gave up after 0\.\d+ s: .*worker process \d+ to answer 'handle'"):
            shared_engine.describe([], soon(0.2))
        shared_engine.begin(version, "stalled", soon(), digest=False)
        with pytest.raises(SyncTimeout, match=r"gave up after 0\.2 s"):
            shared_engine.join(soon(0.2))
        shared_engine.abort("stalled", "the worker is stalled", soon(0.2))
        with pytest.raises(EngineStateError, match="may be stalled"):
            shared_engine.begin(version, "next", soon(), digest=False)
        with pytest.raises(EngineStateError, match="the worker is stalled"):
            shared_engine.generate(PROMPTS, max_new_tokens=1)
        attempt.sender.close()
    finally:
        send(shared_engine, signal.SIGCONT)
    assert shared_engine._update is not None
    with pytest.raises(PeerError):
        shared_engine._update.result(soon())
    wsync.sync(actor, shared_engine)
    assert shared_engine.version() == version
    assert shared_engine.generate(PROMPTS, max_new_tokens=12) == expected_tokens(actor)


def test_a_generation_that_is_given_up_still_counts_until_it_ends(
    shared_engine: HFEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(shared_engine, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(shared_engine._link, "_timeout_s", 0.2)
            with pytest.raises(SyncTimeout, match=r"gave up after 0\.2 s: .*to answer 'generate'"):
                shared_engine.generate(PROMPTS, max_new_tokens=4)
        with pytest.raises(SyncTimeout, match="1 generation"):
            shared_engine.pause("abort", soon(0.2))
    finally:
        send(shared_engine, signal.SIGCONT)
    shared_engine.pause("wait", soon())
    shared_engine.resume()
    assert shared_engine.generate(PROMPTS, max_new_tokens=4)


# Deaths. Each of these tests has a worker of its own.


def test_death_in_a_generation_is_heard_at_once(engine: HFEngine) -> None:
    running = endless(engine)
    send(engine, signal.SIGKILL)
    with pytest.raises(PeerError, match=r"worker process \d+ was killed by SIGKILL; launch the engine again"):
        running.result(soon(10))
    for again in (lambda: engine.generate(PROMPTS, max_new_tokens=1), engine.endpoints, engine.sleep):
        with pytest.raises(PeerError, match="SIGKILL"):
            again()
    engine.pause("abort", soon(10))
    engine.close()


def test_death_in_an_update_is_heard_at_once_and_tears(engine: HFEngine) -> None:
    attempt = HandSync(engine, seeded(llama, 2), ShmTransport())
    engine.begin(1, "a", soon(), digest=False)
    attempt.commit(2)
    send(engine, signal.SIGKILL)
    with pytest.raises(PeerError, match="SIGKILL"):
        engine.join(soon(10))
    engine.abort("a", "the worker died", soon(10))
    with pytest.raises(EngineStateError, match=r"the worker died.*SIGKILL"):
        engine.version()
    attempt.sender.close()


def test_shutdown_ends_the_process_whatever_it_does(engine: HFEngine) -> None:
    with watched(engine.pid) as process:
        running = endless(engine)
        send(engine, signal.SIGSTOP)
        engine.shutdown()
        assert process.ended(0)
        with pytest.raises(ClosedError, match="was shut down"):
            running.result(soon(10))
        with pytest.raises(ClosedError):
            engine.generate(PROMPTS, max_new_tokens=1)
        engine.shutdown()


def test_an_engine_that_nobody_holds_ends_its_process(folder: Path) -> None:
    engine = HFEngine.launch(folder, dtype=torch.bfloat16, timeout_s=TIMEOUT_S)
    assert engine.read("model.norm.weight")[0].dtype == torch.bfloat16
    with watched(engine.pid) as process:
        assert not process.ended(0)
        del engine
        gc.collect()
        assert process.ended(20)


def test_workers_do_not_outlive_their_parent(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.engines.hf_parent", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert select.select([parent.stdout], [], [], TIMEOUT_S)[0], "the parent did not start its workers"
            idle, busy = map(int, parent.stdout.readline().split())
            with watched(idle) as one, watched(busy) as two:
                assert not one.ended(0)
                assert not two.ended(0)
                parent.kill()
                assert one.ended(20)
                assert two.ended(20)
        finally:
            parent.kill()


# Launch.


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a checkpoint folder"):
        HFEngine.launch(tmp_path)


def test_a_checkpoint_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(PeerError, match="no_such_model") as caught:
        HFEngine.launch(tmp_path, timeout_s=TIMEOUT_S)
    assert "from_pretrained" in caught.value.remote_traceback


def test_a_launch_that_takes_too_long_leaves_no_process(folder: Path) -> None:
    with pytest.raises(SyncTimeout, match=r"hf worker process (\d+) to answer 'load'") as caught:
        HFEngine.launch(folder, timeout_s=0.05)
    pid = int(str(caught.value).split("process ")[1].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_weights_do_not_hang_on_the_checkpoint_files(tmp_path: Path) -> None:
    make = FAMILIES["qwen3 moe"]
    seeded(make, 1).to(torch.bfloat16).save_pretrained(tmp_path)
    with HFEngine.launch(tmp_path, timeout_s=TIMEOUT_S) as engine:
        before = engine.generate(PROMPTS, max_new_tokens=8)
        [file] = tmp_path.glob("*.safetensors")
        with open(file, "r+b") as opened:  # in place: the inode that a mapping would show
            opened.write(os.urandom(file.stat().st_size))
        assert engine.generate(PROMPTS, max_new_tokens=8) == before
        actor = seeded(make, 2)
        [manifest] = engine.describe(ModuleProducer(actor).metadata(), soon())
        assert manifest.problems == ()
        assert "unverified" in manifest.verified
        assert manifest.dtypes["model.layers.0.mlp.experts.0.up_proj.weight"] == torch.bfloat16


@pytest.mark.parametrize("broken", ["raise ModuleNotFoundError(\"No module named 'transformers'\")", ""])
def test_a_worker_without_transformers_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Missing, or so old that it lacks what is imported."""
    (tmp_path / "transformers.py").write_text(broken)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        PeerError, match=r"UnsupportedError: the worker process of an hf engine cannot import"
    ) as caught:
        HFEngine.launch(folder, timeout_s=TIMEOUT_S)
    assert "pip install 'wsync-rl[hf]'" in str(caught.value).partition("\n")[0]
