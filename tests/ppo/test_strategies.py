"""Every way to shard trains in the same way, and cuts of a step into micro-batches do not matter."""

from pathlib import Path

import pytest

from tests.ppo.jobs import SMALL, run

SHARDINGS = ("--fsdp", "--zero_stage 1", "--zero_stage 2", "--zero_stage 3", "--fsdp --micro_train_batch_size 4")
COMPARED = ("reward", "kl", "policy_loss", "value_loss", "actor_grad_norm", "critic_grad_norm", "clip_fraction")


@pytest.mark.slow
def test_all_agree(tmp_path: Path) -> None:
    """Two steps, in two epochs of two optimizer steps each: only rounding differs."""
    found = [
        run(tmp_path / str(number), f"{SMALL} --engine_type hf --steps 2 {sharding}")
        for number, sharding in enumerate(SHARDINGS)
    ]
    other = run(tmp_path / "other", f"{SMALL} --engine_type hf --steps 2 --fsdp --loss_agg_mode seq-mean-token-mean")
    assert other[0]["policy_loss"] != pytest.approx(found[0][0]["policy_loss"], rel=1e-4)
    for sharding, lines in zip(SHARDINGS, found, strict=True):
        for line, first in zip(lines, found[0], strict=True):
            for name in COMPARED:
                assert line[name] == pytest.approx(first[name], rel=1e-4, abs=1e-6), (sharding, line["step"], name)
