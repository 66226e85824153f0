"""A mode that syncs at every second step: what it saves, what it costs, and what makes up for that."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.ppo.mode_steps import of_the_readme
from wsync.testing.ranks import run_ranks

RUN = "--fsdp --engine_type hf --steps 4 --actor_learning_rate 1e-2"
PARTS = ("seconds_generate", "seconds_score", "seconds_train", "seconds_sync")


def lines(options: str) -> list[Mapping[str, float]]:
    found: list[Any] = run_ranks(of_the_readme, 2, options, timeout_s=200)
    assert all(kept for _, kept in found), "R65: an option was rewritten"
    logged: list[Mapping[str, float]] = found[0][0]
    return logged


@pytest.mark.slow
def test_what_a_sync_costs_and_what_none_costs_are_seen() -> None:
    """R61 and R62: time by part, of this iteration alone. R63: how far an engine that was not synced is behind."""
    plain = lines(RUN)
    assert ["seconds_transfer" in line for line in plain] == [False, True, False, True]
    for line in plain:
        assert all(line[part] > 0 for part in PARTS)
        assert sum(line[part] for part in PARTS) <= line["seconds"]
        assert line["sync_share"] == pytest.approx(line["seconds_sync"] / line["seconds"])
        assert line.get("seconds_transfer", 0.0) <= line["seconds_sync"]
    gaps = [line["engine_gap"] for line in plain]
    assert max(gaps[::2]) < 1e-5, "after the sync at the start, and that of step 2"
    assert min(gaps[1::2]) > 0.1


@pytest.mark.slow
def test_what_a_stale_engine_sampled_can_be_weighed() -> None:
    """R63: no difference where the engine is as the actor, and one where it is not."""
    plain, weighed = (lines(f"{RUN} --steps 2 {more}") for more in ("", "--importance_cap 2"))
    fresh, stale = zip(plain, weighed, strict=True)
    assert fresh[0]["actor_grad_norm"] == pytest.approx(fresh[1]["actor_grad_norm"], rel=1e-4)
    assert stale[0]["engine_gap"] == pytest.approx(stale[1]["engine_gap"], rel=1e-2)
    assert stale[0]["actor_grad_norm"] != pytest.approx(stale[1]["actor_grad_norm"], rel=1e-2)
