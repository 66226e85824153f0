"""The reference is where the actor began, and stays there."""

import pytest

from tests.ppo.rank_steps import numbers, trained
from wsync.testing.ranks import run_ranks

RUN = "--engine_type hf --steps 2"


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["--fsdp", pytest.param("--zero_stage 2", marks=pytest.mark.matrix)])
def test_no_bit_of_it_changes(sharding: str) -> None:
    """R13: the same checkpoint, frozen. On every rank it is sharded as FSDP2 shards the actor."""
    for facts in run_ranks(trained, 2, f"{sharding} {RUN}", timeout_s=200):
        before, after = facts["before"], facts["after"]
        assert before["reference"] == after["reference"]
        assert before["actor"] != after["actor"]
        if sharding == "--fsdp":
            assert before["reference"] == before["actor"]


@pytest.mark.slow
def test_the_actor_leaves_it() -> None:
    """R13: KL is 0 for as long as nothing was trained."""
    first, second = run_ranks(numbers, 2, [f"--fsdp {RUN}"], timeout_s=200)[0][0]
    assert first["kl"] == pytest.approx(0, abs=1e-5)
    assert second["kl"] > 1e-3
