"""The comparison of ways to replay a load plan, as far as it goes without a GPU."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import replay_ways
from benchmarks.replay_ways import FOREACH, KERNELS, LOOP, Model, Move, fused, main, moves_of
from wsync.bench.gpu.models import DENSE, MOE
from wsync.bench.results import read

CPU = torch.device("cpu")


@pytest.mark.parametrize(("shape", "tensors", "parameters"), [(DENSE, 339, 199), (MOE, 4719, 111)])
def test_models_have_their_size_and_parameters_are_fused(shape: str, tensors: int, parameters: int) -> None:
    moves = moves_of(shape, small=False)
    assert (len(moves), len({move.target for move in moves})) == (tensors, parameters)


def test_rows_follow_each_other() -> None:
    filled = dict[int, int]()
    for move in moves_of(MOE, small=True):
        assert move.start == filled.get(move.target, 0)
        filled[move.target] = move.start + move.numel


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("layers.0.self_attn.k_proj.bias", "layers.0.self_attn.qkv_proj.bias"),
        ("layers.0.mlp.up_proj.weight", "layers.0.mlp.gate_up_proj.weight"),
        ("layers.0.mlp.experts.17.gate_proj.weight", "layers.0.mlp.experts.gate_up_proj.weight"),
        ("layers.0.mlp.gate.weight", "layers.0.mlp.gate.weight"),
        ("layers.0.self_attn.q_norm.weight", "layers.0.self_attn.q_norm.weight"),
    ],
)
def test_what_is_fused_with_what(name: str, parameter: str) -> None:
    assert fused(name) == parameter


def test_a_way_that_brings_wrong_bytes_is_found() -> None:
    model = Model([Move(0, 0, 300), Move(0, 300, 100), Move(1, 0, 7)], torch.float32, CPU)
    ways = replay_ways.ways_of(model)
    assert list(ways) == [KERNELS, FOREACH, LOOP]
    assert all(model.arrived(way) for way in ways.values())

    def all_but_one_element() -> None:
        ways[LOOP]()
        model.rows[1][99] += 1

    assert not model.arrived(all_but_one_element)
    assert not model.arrived(lambda: None)


def test_a_small_run_ends_with_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--small", "--json", str(tmp_path / "rows.json")]) == 0
    shown = capsys.readouterr().out
    assert [line.partition(":")[0] for line in shown.splitlines() if not line.startswith(" ")] == [
        "replay of dense-7b, bfloat16 to bfloat16",
        "replay of moe, bfloat16 to bfloat16",
        "replay of dense-7b, float32 to bfloat16",
    ]
    assert len(re.findall(rf"^  ({KERNELS}|{FOREACH}|{LOOP}) +[\d.]+ +[\d.]+$", shown, re.MULTILINE)) == 9
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert all(row["ok"] and len(row["samples"]) == replay_ways.ROUNDS for row in rows)
    assert len(read(tmp_path / "rows.json").measured) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
