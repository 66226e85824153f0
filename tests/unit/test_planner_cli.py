"""The command line of the planner: what it prints, writes and returns."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.unit.planner_settings import GIB, NUMEL, TINY
from wsync.planner.cli import MISUSED, TOO_LARGE, main

SMALL = ("memory", "--model", "0.5b", "--gpu-mem", "80")
SEVEN_B = ("memory", "--model", "7b", "--gpus", "2", "--tp", "2")


def code_of(arguments: list[str]) -> object:
    try:
        return main(arguments)
    except SystemExit as end:  # how argparse leaves
        return end.code


def test_a_process_of_its_own_that_loads_no_framework(tmp_path: Path) -> None:
    program = (
        "import sys; from wsync.planner.cli import main; "
        "code = main(sys.argv[1:]); "
        "assert not {'transformers', 'vllm', 'sglang', 'deepspeed', 'peft', 'matplotlib'} & set(sys.modules); "
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *SEVEN_B, "--gpu-mem", "140"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "7b: 7.62e9 parameters, 2 GPU(s) of 140.0 GiB"
    assert "GiB on each GPU     launch  rollout   sync  train" in lines
    [actor] = [line for line in lines if line.startswith("actor ")]
    assert actor.split() == ["actor", "-", "-", "14.2", "14.2"]
    assert sum(" fits: " in line for line in lines) == 4
    assert "host memory of a node of 2 GPU(s): 85.1 GiB (actor 28.4 GiB, optimizer 56.7 GiB)" in lines


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN_B, "--gpu-mem", "64", "--kv-gib", "10"]) == TOO_LARGE
    out = capsys.readouterr().out
    assert (
        "train does not fit: 7.7 GiB are missing; optimizer is the largest with 28.4 GiB. Enough by itself: 4 ranks"
        in out
    )
    assert "rollout fits" in out
    assert "reload optimizer 44.4" in out


def test_a_step_that_does_not_fit_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN_B, "--gpu-mem", "40", "--kv-gib", "10"]) == TOO_LARGE
    assert "reload optimizer 44.4 (does not fit)" in " ".join(capsys.readouterr().out.split())


def test_weights_beside_the_cache_are_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN_B, "--gpu-mem", "140", "--kv-fraction", "0.4", "--offload", "optimizer"]) == 0
    assert "the actor's weights are beside the KV cache: offload the actor" in capsys.readouterr().out
    assert main([*SEVEN_B, "--gpu-mem", "140", "--kv-fraction", "0.4"]) == 0
    assert "beside the KV cache" not in capsys.readouterr().out


def test_no_room_for_a_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEVEN_B, "--gpu-mem", "140", "--kv-fraction", "0.05"]) == TOO_LARGE
    out = capsys.readouterr().out
    assert "and there is no room for a KV cache. Enough by itself: a KV fraction of 0.08" in out
    assert "train fits" in out


def test_json_of_a_config_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    arguments = ["memory", "--config", str(tmp_path), "--gpu-mem", "8GB", "--kv-gib", "1", "--sleep-level", "1"]
    assert main([*arguments, "--trainer", "lora", "--transport", "inproc", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "plain with LoRA of rank 16 over 1 rank(s)" in err
    assert (found["parameters"], found["gpu_bytes"], found["fits"]) == (NUMEL, 8 * 10**9, True)
    phases = {phase["name"]: phase for phase in found["phases"]}
    assert list(phases) == ["launch", "rollout", "sync", "train"]
    for phase in phases.values():
        assert phase["peak"] == sum(phase["residents"].values())
        assert phase["left"] == 8 * 10**9 - phase["peak"]
        assert phase["residents"][phase["largest"]] == max(phase["residents"].values())
        assert (phase["fits"], phase["changes"], phase["actor_beside_cache"]) == (True, [], False)
    assert phases["rollout"]["residents"]["engine kv_cache"] == GIB
    assert phases["sync"]["residents"]["engine weights"] == 2 * NUMEL
    assert [move["name"] for move in found["moves"]][:2] == ["offload optimizer", "wake weights"]
    assert set(found["host_bytes_per_node"]) == {"actor", "optimizer", "engine weights"}
    assert found["kv_cache_tokens"] == GIB // (2 * 2 * 2 * 16 * 2)


def test_json_and_picture_in_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    assert (
        main([*SEVEN_B, "--gpu-mem", "20", "--kv-gib", "1", "--json", str(wanted), "--plot", str(picture)]) == TOO_LARGE
    )
    found = json.loads(wanted.read_text())
    assert found["fits"] is False
    assert [phase["fits"] for phase in found["phases"]] == [True, True, False, False]
    assert "4 ranks that share the actor" in found["phases"][2]["changes"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "train does not fit" in capsys.readouterr().out


def test_every_option_is_heeded(tmp_path: Path) -> None:
    """Each of them changes what is written."""
    written: dict[str, str] = {}
    for number, change in enumerate(
        [
            *("", "--model 14b", "--gpus 4", "--gpu-mem 90", "--cuda-context-gib 1", "--gpus-per-node 1"),
            *("--trainer plain", "--ranks 1", "--lora-rank 4", "--actor-dtype bf16"),
            *("--compute-dtype fp32", "--optimizer sgd", "--master", "--offload none", "--activations-gib 3"),
            *("--micro-batch 2", "--sequence 99", "--no-checkpointing", "--engine-dtype fp32", "--tp 1"),
            *("--kv-gib 7", "--kv-fraction 0.7", "--engine-activations-gib 2", "--cuda-graph-gib 1"),
            *("--sleep-level 1", "--transport inproc", "--path buckets", "--staging-mib 64"),
            *("--path buckets --bucket-mib 64", "--path buckets --num-slots 3"),
            *("--trainer zero2", "--trainer zero2 --no-master", "--trainer zero2 --reduce-bucket 7"),
        ]
    ):
        file = tmp_path / f"{number}.json"
        main([*SEVEN_B, "--gpu-mem", "80", *change.split(), "--json", str(file)])
        written[change] = file.read_text()
    assert len(set(written.values())) == len(written)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: WHAT"),
        (["time"], "invalid choice: 'time' (choose from "),
        (["memory", "--model", "7b"], "required: --gpu-mem"),
        (["memory", "--gpu-mem", "80"], "one of the arguments --model --config is required"),
        (["memory", "--model", "7b", "--gpu-mem", "80TB"], "80TB is not a number"),
        (["memory", "--model", "7b", "--gpu-mem", "0"], "0 is not a positive number"),
        (["memory", "--gpu-mem", "inf"], "inf is not a finite number"),
        (["memory", "--gpu-mem", "80", "--model", "8b"], "there is no model '8b'; choose from 0.5b, 7b"),
        (["memory", "--gpu-mem", "80", "--model", "7b", "--config", "x"], "not allowed with argument --model"),
        (["memory", "--gpu-mem", "80", "--config", "/nowhere"], "cannot read /nowhere"),
        ([*SMALL, "--gpus", "0"], "0 is not a whole number of at least 1"),
        ([*SMALL, "--gpus", "1.5"], "1.5 is not a whole number of at least 1"),
        ([*SMALL, "--trainer", "jax"], "invalid choice: 'jax' (choose from "),
        ([*SMALL, "--offload", "critic"], "['critic'] cannot be offloaded; choose from actor"),
        ([*SMALL, "--kv-gib", "0"], "0 is too small a size"),
        ([*SMALL, "--activations-gib", "-1"], "-1 is too small a size"),
        ([*SMALL, "--kv-gib", "1", "--kv-fraction", "1"], "not allowed with argument --kv-gib"),
        ([*SMALL, "--kv-fraction", "2"], "kv_fraction is 2.0; it must be above 0 and at most 1"),
        ([*SMALL, "--tp", "2"], "tp is 2, which does not divide 1, the gpus"),
        ([*SMALL, "--bucket-mib", "0"], "bucket_bytes is 0; it must be at least 4096 bytes"),
        ([*SMALL, "--json", "/nowhere/plan.json"], "there is no folder /nowhere"),
        ([*SMALL, "--plot", "/nowhere/plan.png"], "there is no folder /nowhere"),
        ([*SMALL, "--plot", "plan.doc"], "the name must end in one of"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(arguments) == MISUSED
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main([*SEVEN_B, "--gpu-mem", "80", "--plot", "plan.png"]) == MISUSED
    assert "pip install 'wsync-rl[bench]'" in capsys.readouterr().err


def test_the_module_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wsync.planner", "memory", "--model", "7b", "--gpu-mem", "1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == TOO_LARGE, done.stderr
    assert "does not fit" in done.stdout


def test_the_page_shows_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/planner.md").read_text(encoding="utf-8")
    [command] = [line for line in page.splitlines() if line.startswith("    python -m wsync.planner ")]
    assert main(command.split()[3:]) == TOO_LARGE
    shown = textwrap.indent(capsys.readouterr().out, "    ")
    assert f"prints\n\n{shown}\nand ends with 1" in page
