"""Who is on the device when: one iteration, hook by hook."""

from pathlib import Path
from typing import Any

import pytest

from integrations.ppo.arguments import Arguments
from integrations.ppo.strategy.phases import phases
from tests.ppo.memory_steps import engine_states, parted, placed, synced, waited, watched
from tests.ppo.rank_steps import trained
from wsync.testing.ranks import run_ranks

ENGINE = ["engine kv_cache", "engine weights"]
MODELS = ["actor", "critic"]
TRAINING = ["actor", "actor optimizer", "critic", "critic optimizer"]
OPTIMIZERS = ["actor optimizer", "critic optimizer"]


def test_phases_by_options() -> None:
    def of(**options: Any) -> dict[str, set[str]]:
        found = phases(Arguments(**options), MODELS, OPTIMIZERS, engine=True)
        return {name: set(residents) for name, residents in found.items()}

    everything = {*ENGINE, *MODELS, *OPTIMIZERS}
    assert of() == {
        "rollout": everything,
        "sync": everything - {"engine kv_cache"},
        "score": everything - {*ENGINE},
        "train": everything - {*ENGINE},
    }
    assert of(offload_models=True, adam_offload=True) == {
        "rollout": {*ENGINE},
        "sync": {"actor", "engine weights"},
        "score": {*MODELS},
        "train": {*MODELS, *OPTIMIZERS},
    }
    assert set(map(frozenset, of(disable_engine_sleep=True).values())) == {frozenset(everything)}


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["--fsdp", "--zero_stage 2", "--fsdp --engine_sleep_level 2"])
def test_one_iteration(sharding: str) -> None:
    """R22, R36; R70: the critic's optimizer was seen to stay."""
    options = f"{sharding} --engine_type hf --steps 1 --eval_every 1 --offload_models --adam_offload"
    for seen in run_ranks(watched, 2, options, timeout_s=200):
        assert seen == [
            ("on_init_end", "score", MODELS),
            ("on_train_begin", "score", MODELS),
            ("on_step_begin", "score", MODELS),
            ("on_sample_begin", "score", MODELS),
            ("on_sample_end", "score", MODELS),
            ("backward", "train", TRAINING),
            ("on_step_end", "rollout", ENGINE),
            ("on_validate_begin", "rollout", ENGINE),
            ("on_validate_end", "score", MODELS),
            ("on_train_end", "score", MODELS),
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding", ["--fsdp", *(pytest.param(f"--zero_stage {stage}", marks=pytest.mark.matrix) for stage in (1, 2, 3))]
)
def test_offload_changes_no_bit(sharding: str) -> None:
    """R57, R73: DeepSpeed's models and optimizers leave and come back as FSDP2's do."""
    options = f"{sharding} --engine_type hf --steps 2"
    leaving = "" if sharding == "--zero_stage 3" else "--adam_offload"
    stays, leaves = (
        run_ranks(trained, 2, f"{options} {more}", timeout_s=200)
        for more in ("--disable_engine_sleep", f"--offload_models {leaving}")
    )
    for one, other in zip(stays, leaves, strict=True):
        assert one["after"] != one["before"]
        assert one["after"] == other["after"]


@pytest.mark.slow
def test_what_fsdp2_offloads_nobody_else_moves() -> None:
    """R58: a trainer was seen to move models by hand that have a CPUOffloadPolicy."""
    runs = ["--fsdp", "--fsdp --fsdp_cpu_offload", "--fsdp --initial_model_shard_size 1", "--fsdp --bf16"]
    runs = [f"{one} --engine_type hf" for one in runs]
    for plain, offloaded, copied, low in run_ranks(placed, 2, runs, timeout_s=200):
        assert plain["meshes"] == {"actor": (2,), "critic": (2,), "reference": (2,)}
        assert plain["policies"] == dict.fromkeys(plain["meshes"], "OffloadPolicy")
        assert plain["residents"] == sorted([*ENGINE, *TRAINING, "reference"])
        assert plain["moved"] == "nothing"
        assert offloaded["policies"] == {**dict.fromkeys(MODELS, "CPUOffloadPolicy"), "reference": "OffloadPolicy"}
        assert offloaded["residents"] == sorted([*ENGINE, "reference"])
        assert "FSDP2 moves actor by itself" in offloaded["moved"]
        assert copied["meshes"] == {"actor": (2,), "critic": (2,), "reference": (2, 1)}
        assert copied["sizes"]["reference"] > 1.9 * plain["sizes"]["reference"]
        assert low["sizes"]["reference"] < 0.6 * plain["sizes"]["reference"]
        assert low["sizes"]["actor"] == plain["sizes"]["actor"]


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_the_engine_wakes_and_sleeps(level: int) -> None:
    """R8, R17: waking is idempotent, and no sync at level 1; at level 2 it is one. Nothing is read from a disk.

    R54, R55: which it is is said by the level, whatever the engine would drop by itself.
    """
    asleep, awake = "SLEEPED 0", "WAKEUP 1"
    for rank, seen in enumerate(run_ranks(engine_states, 2, f"--engine_sleep_level {level}", timeout_s=120)):
        assert seen["states"] == {
            "no engine": asleep,
            "set up": asleep,
            "woken": awake,
            "woken again": awake,
            "sent to sleep": asleep,
            "generated": asleep,
            "generated, kept awake": awake,
            "synced": awake,
        }
        assert seen["without an engine"] == (None, "" if rank else "there is no inference engine to update\n"), "R7"
        assert seen["woken"] == seen["set up" if level == 1 else "synced"]
        assert seen["set up"] != seen["synced"]


@pytest.mark.slow
def test_an_engine_that_may_not_sleep_is_awake_once_it_is_there() -> None:
    for seen in run_ranks(engine_states, 2, "--disable_engine_sleep", timeout_s=120):
        assert seen["states"].pop("no engine") == "SLEEPED 0"
        assert set(seen["states"].values()) == {"WAKEUP 1"}
        assert seen["woken"] == seen["set up"] != seen["synced"]


@pytest.mark.slow
def test_no_sync_is_made_for_nothing(tmp_path: Path) -> None:
    """At level 2 one more each time that the engine slept; the first one, at either level, is before it sleeps."""
    run = "--fsdp --engine_type hf --steps 2"
    more = f"{run} --eval_before_train --eval_every 1"
    saving = "--steps 1 --save_every 1 --ckpt_dir"
    runs = [
        run,
        f"{run} --engine_sleep_level 2",
        more,
        f"{more} --engine_sleep_level 2",
        *(f"{run} {saving} {tmp_path}/{level} --engine_sleep_level {level}" for level in (1, 2)),
        *(f"{run} --ckpt_dir {tmp_path}/{level} --engine_sleep_level {level}" for level in (1, 2)),
    ]
    for counts in run_ranks(synced, 2, runs, timeout_s=300):
        assert counts == [
            1 + 2,
            1 + 1 + 2,
            1 + 2,
            1 + 3 + 2,
            1 + 1,
            1 + 1 + 1,
            1 + 1 + 1,  # it goes on after the first of two iterations, with the checkpoint's weights
            1 + 1 + 1,
        ]


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--disable_engine_sleep"])
@pytest.mark.parametrize(
    ("calls", "phases_entered"),
    [(("train", "score"), "['train', 'score']"), (("sync", "generate"), "['sync', 'rollout']")],
)
def test_ranks_that_part_are_told_so(calls: tuple[str, str], phases_entered: str, options: str) -> None:
    """R53: instead of waiting for each other without end."""
    for words in run_ranks(parted, 2, options, *calls, timeout_s=120):
        assert f"trainer ranks enter different phases: {phases_entered}" in words


@pytest.mark.slow
def test_how_long_ranks_are_waited_for() -> None:
    """R53: one that skips what the others do is named."""
    said, _ = run_ranks(waited, 2, timeout_s=100)
    assert "trainer rank(s) [1] did not reach" in said
    assert "within 5 s" in said
