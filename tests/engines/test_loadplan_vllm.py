"""The load plans of real vLLM models, one after the other in a process of their own."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
DEADLINE_S = 240.0

CASES = {"llama": (21, 2), "tied": (20, 1), "moe": (45, 2)}
"""Model -> copies and fills in its plan."""


@cache
def all_facts() -> dict[str, Any]:
    """What the child process found out, by model; `run` kills it at the deadline."""
    with TemporaryDirectory() as folder:
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "tests.engines.loadplan_vllm_child", folder, *CASES],
            cwd=Path(__file__).parents[2],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("FACTS "))
    return found


def facts(case: str) -> Any:
    return all_facts()[case]


@pytest.mark.parametrize(("case", "copies", "fills"), [(case, *counts) for case, counts in CASES.items()])
def test_every_copy_is_recorded_and_replay_equals_load_weights(case: str, copies: int, fills: int) -> None:
    found = facts(case)
    assert found["changed_by_dry_runs"] == []
    assert (found["copies"], found["fills"], found["tensors"]) == (copies, fills, copies)
    assert found["through_loader"] == {}
    assert found["chunked"] > 4, "some tensors must be larger than a bucket"
    assert found["changed_by_replay"] > 10
    assert found["replay_differs_from_loader"] == []


@pytest.mark.parametrize("case", ["llama", "tied"])
def test_the_plan_is_verified_against_the_launch_weights(case: str) -> None:
    found = facts(case)
    assert found["problems"]["all"] == []
    assert found["verified"] == f"verified: {found['tensors']} of {found['tensors']} tensors against the launch weights"


def test_experts_that_the_cpu_build_repacks_are_found_by_the_launch_weights() -> None:
    problems = facts("moe")["problems"]["all"]
    experts = "model.layers.{}.mlp.experts.routed_experts.{}_weight"
    assert sorted(problem.split(" ")[0] for problem in problems) == [
        experts.format(layer, name) for layer in range(2) for name in ("w13", "w2")
    ]
    assert all("its live bytes are not what the loader of vLLM writes" in problem for problem in problems)


def test_a_dropped_k_proj_is_a_hole_in_qkv_proj() -> None:
    problems = facts("llama")["problems"]["no k_proj"]
    name = "model.layers.1.self_attn"
    assert problems == [
        f"{name}.qkv_proj.weight (256x64): rows 128-191 are written by no tensor; "
        f"it gets {name}.q_proj.weight, {name}.v_proj.weight"
    ]


def test_unknown_names_and_silently_narrowed_inputs_are_found() -> None:
    found = facts("llama")
    assert len(found["problems"]["unknown"]) == 1
    assert found["problems"]["unknown"][0].startswith("model.layers.7.nothing.weight: vLLM refuses it (")
    narrowed = "model.layers.0.mlp.down_proj.weight"
    assert found["unused"] == [narrowed], "vLLM narrows it without a word; how much of it is used tells"
    assert found["problems"]["wrong shape"] == [f"{narrowed}: launched with shape [64, 96], offered with [64, 98]"]
