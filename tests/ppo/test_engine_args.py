"""What vLLM and SGLang are made with, on stand-ins for them: by the trainer itself, and by --engine_args."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from integrations.ppo.arguments import parse
from integrations.ppo.conflicts import SET_BY_TRAINER
from integrations.ppo.engines import start_engine

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 3)
OWN_DEFAULTS = {
    "vllm": {"enforce_eager", "kv_cache_memory_bytes"},
    "sglang": {
        "attention_backend",
        "sampling_backend",
        "disable_cuda_graph",
        "disable_overlap_schedule",
        "max_total_tokens",
    },
}
"""What --engine_args may say otherwise."""


def made(patch: pytest.MonkeyPatch, device: torch.device, *argv: str) -> dict[str, Any]:
    """The keywords that the engine of that command line is made with."""
    args, seen = parse([*argv]), dict[str, Any]()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    patch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=seen.update))
    patch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=seen.update))
    group: Any = SimpleNamespace(place=0)
    start_engine(args, Path("checkpoint"), device, group)
    return seen


@pytest.mark.parametrize("device", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_the_trainer_sets_is_not_for_anybody_else(
    monkeypatch: pytest.MonkeyPatch, engine: str, device: torch.device
) -> None:
    seen = made(monkeypatch, device, "--engine_type", engine)
    assert seen.keys() - OWN_DEFAULTS[engine] <= {*SET_BY_TRAINER[engine]}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_further_arguments_come_through_and_before_defaults(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    further = '{"attention_backend": "TRITON_ATTN", "enforce_eager": false, "deep": {"a": [1]}}'
    seen = made(monkeypatch, CPU, "--engine_type", engine, "--engine_args", further)
    assert (seen["attention_backend"], seen["enforce_eager"], seen["deep"]) == ("TRITON_ATTN", False, {"a": [1]})
    plain = made(monkeypatch, CPU, "--engine_type", engine)
    assert {name for name in plain if plain[name] != seen[name]} <= {"attention_backend", "enforce_eager"}


@pytest.mark.parametrize("level", [1, 2])
def test_sglang_keeps_a_copy_of_its_weights_at_level_1_alone(monkeypatch: pytest.MonkeyPatch, level: int) -> None:
    seen = made(monkeypatch, CUDA, "--engine_type", "sglang", "--engine_sleep_level", str(level))
    assert seen["enable_weights_cpu_backup"] is (level == 1)
