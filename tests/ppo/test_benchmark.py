"""The benchmark of the trainer: what it reads from a run, and a small run of it with real vLLM."""

import json
from pathlib import Path

import pytest

from benchmarks.ppo_facts import PPOFacts
from tests.engines.vllm_runner import run_program
from wsync.memory.ledger import Ledger
from wsync.testing.fake_device import FakeDevice

GIB = 1 << 30


def recorded(folder: Path, peaks: list[int]) -> PPOFacts:
    """Of a run that took 3 GiB to roll out and `peaks` GiB to train, then reached the next rollout."""
    device = FakeDevice(100 * GIB)
    ledger = Ledger(device)
    for peak in peaks:
        for phase, most in (("rollout", 3), ("train", peak)):
            ledger.record(f"to {phase}", "began", {})
            device.empty_cache()
            device.reset_peak()
            ledger.record(phase, "entered", {})
            device.take("tensors", most * GIB)
            device.give("tensors")
            ledger.record(phase, "left", {})
    ledger.record("to rollout", "began", {})
    ledger.write_json(folder / "memory.json")
    seconds = {
        "seconds_generate": 3.0,
        "seconds_score": 1.0,
        "seconds_train": 5.0,
        "seconds_sync": 1.0,
        "seconds_transfer": 0.5,
    }
    lines = [{"step": 0, "eval_reward": 1.0}]
    lines += [{"step": step, **seconds, "seconds": 10.0, "sync_share": 0.1} for step in range(len(peaks))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return PPOFacts(folder)


@pytest.mark.parametrize(("peaks", "growth"), [([9, 5, 5, 5], 0), ([5, 6, 6, 6], 0), ([5, 5, 4, 7], 2), ([5], 0)])
def test_growth_counts_from_the_second_iteration_on(tmp_path: Path, peaks: list[int], growth: int) -> None:
    facts = recorded(tmp_path, peaks)
    assert facts.peaks == {"rollout": [3 * GIB] * len(peaks), "train": [peak * GIB for peak in peaks]}
    assert facts.growth == growth * GIB
    assert len(facts.iterations) == len(peaks)
    assert facts.median("sync_share") == 0.1


def test_of_a_run_that_was_ended_before_it_wrote_anything(tmp_path: Path) -> None:
    facts = PPOFacts(tmp_path)
    assert (facts.iterations, facts.peaks, facts.growth) == ([], {}, 0)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_small_run(tmp_path: Path) -> None:
    run_program("benchmarks.ppo_run", ["--out", tmp_path / "out", "--small", "--steps", "3"], tmp_path / "log.txt")
    out = tmp_path / "out"
    (written,) = out.glob("ppo_*.json")
    found = json.loads(written.read_text())
    assert found["versions"].keys() >= {"torch", "transformers", "vllm"}
    (row,) = found["rows"]
    assert row["ok"]
    assert [line["step"] for line in row["facts"]["iterations"]] == [1, 2, 3]
    assert {phase: len(peaks) for phase, peaks in row["facts"]["peak bytes of the device"].items()} == dict.fromkeys(
        ["rollout", "score", "train", "sync"], 3
    )
    assert all((out / name).is_file() for name in ("ppo_memory.svg", "ppo_iterations.svg", "log/metrics.jsonl"))
    assert "ok    3 iterations" in (tmp_path / "log.txt").read_text()
