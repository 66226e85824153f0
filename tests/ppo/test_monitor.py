"""What ends up in --log_dir."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from integrations.ppo.monitor import Monitor
from tests.ppo.jobs import SMALL, run
from wsync.memory.host_device import HostDevice
from wsync.memory.ledger import Ledger


def recorded() -> Ledger:
    ledger = Ledger(HostDevice())
    ledger.record("train", "entered", {"actor": 1})
    return ledger


def test_files(tmp_path: Path) -> None:
    with Monitor(str(tmp_path / "new"), 2, active=True) as monitor:
        monitor.log(1, {"reward": 0.5})
        monitor.log(2, {"reward": 0.75, "kl": 1.0})
        monitor.lengths(2, [1, 2, 2, 16], 16)
        monitor.memory("step 2: all of it")
        monitor.ledger(recorded())
    folder = tmp_path / "new"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75, "kl": 1.0}]
    assert (folder / "lengths" / "step_000002.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "memory.log").read_text() == "step 2: all of it\n"
    assert [row["phase"] for row in json.loads((folder / "memory.json").read_text())["entries"]] == ["train"]
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(folder)).Reload()
    assert [(one.step, one.value) for one in events.Scalars("reward")] == [(1, 0.5), (2, 0.75)]


@pytest.mark.parametrize("active", [True, False])
def test_without_a_folder_nothing_is_written(tmp_path: Path, active: bool) -> None:
    folder = "" if active else str(tmp_path)
    with Monitor(folder, 1, active=active) as monitor:
        monitor.log(1, {"reward": 0.5})
        monitor.lengths(1, [1], 2)
        monitor.memory("words")
        monitor.ledger(recorded())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_of_a_run(tmp_path: Path) -> None:
    """R74: plots go to --log_dir. R66: evaluations are made. R51: every iteration has its line about memory."""
    found = run(
        tmp_path, f"--fsdp --engine_type hf {SMALL} --steps 2 --plot_every 2 --eval_every 1 --eval_before_train"
    )
    assert [line["step"] for line in found] == [0, 1, 1, 2, 2]
    assert all(0 <= line["eval_reward"] <= 1 for line in found[::2])
    assert [path.name for path in (tmp_path / "lengths").iterdir()] == ["step_000002.png"]
    phases = {row["phase"] for row in json.loads((tmp_path / "memory.json").read_text())["entries"]}
    assert {"rollout", "score", "train", "sync"} <= phases
    assert (tmp_path / "memory.png").is_file()
    memory = (tmp_path / "memory.log").read_text().splitlines()
    assert [line.split(" |")[0] for line in memory] == ["step 1", "step 2"]
    assert all(0 < line["sync_share"] < 1 for line in found[1::2])
