"""It learns, and it does not if the engine is never synced. Steps are bounded, not seconds."""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.ppo.jobs import SMALL, run

STEPS = 40
MOST_GAP = 1e-5
"""Between log-probabilities of engine and actor right after a sync, in float32."""

LORA = "--lora_rank 16 --lora_alpha 32 --actor_learning_rate 2e-3"

CASES = [
    pytest.param("--fsdp --engine_type hf", id="fsdp2-hf"),
    pytest.param("--fsdp --engine_type vllm", id="fsdp2-vllm", marks=[pytest.mark.vllm, pytest.mark.matrix]),
    pytest.param("--zero_stage 3 --engine_type hf", id="zero3-hf", marks=pytest.mark.matrix),
    pytest.param("--fsdp --engine_type hf --engine_sleep_level 2", id="level2-hf", marks=pytest.mark.matrix),
    pytest.param(
        "--zero_stage 2 --engine_type sglang --engine_tp_size 2",
        id="zero2-sglang",
        marks=[pytest.mark.sglang, pytest.mark.matrix],
    ),
    pytest.param(f"--fsdp --engine_type vllm {LORA}", id="lora-vllm", marks=[pytest.mark.vllm, pytest.mark.matrix]),
]


def rewards(found: list[dict[str, Any]]) -> tuple[float, float]:
    """(mean of the first three steps, of the last three)."""
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    each = [line["reward"] for line in found]
    return mean(each[:3]), mean(each[-3:])


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES)
def test_it_learns(tmp_path: Path, options: str) -> None:
    """R59 among them: LoRA with vLLM was seen to be not implemented."""
    found = run(tmp_path, f"{options} {SMALL} --steps {STEPS}")
    first, last = rewards(found)
    assert first < 0.2
    assert last > 0.8
    assert max(line["engine_gap"] for line in found) < MOST_GAP
    assert found[-1]["kl"] > 0
    assert 0 < max(line["sync_share"] for line in found) < 1


@pytest.mark.slow
def test_it_does_not_without_syncs(tmp_path: Path) -> None:
    """And the gap is seen, which shows that it is measured."""
    options = f"--fsdp --engine_type hf --trainer no-sync {SMALL} --steps {STEPS}"
    found = run(tmp_path, options, module="tests.ppo.no_sync")
    first, last = rewards(found)
    assert first < 0.2
    assert last < 0.2
    assert found[-1]["engine_gap"] > 0.5
