"""The command line of the bench, in processes of its own, at small scale."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wsync.bench.cli import MISUSED, WRONG, main

TIMEOUT_S = 240
SMALL = ("--scale", "0.0005", "--rounds", "2", "--timeout-s", "120")
SPOILED = """
import sys
from wsync.bench.cli import main
from wsync.testing.chaos import Fault

if __name__ == "__main__":
    for kind in ("flip", "kill"):
        print(main([*sys.argv[2:], "--json", f"{sys.argv[1]}/{kind}.json"], fault=Fault(kind=kind, bucket=0)))
"""


def run(*command: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a Python process."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=TIMEOUT_S)
    return done.returncode, done.stdout, done.stderr


def test_rows_table_and_picture(tmp_path: Path) -> None:
    wanted, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    code, out, err = run(
        *("-m", "wsync.bench", "--case", "large", "--transport", "inproc", "shm", "gloo", *SMALL),
        *("--json", str(wanted), "--plot", str(picture)),
    )
    assert code == 0, out + err
    content = json.loads(wanted.read_text())
    assert {"time", "hardware", "versions", "rows"} <= set(content)
    for row, transport in zip(content["rows"], ("inproc", "shm", "gloo"), strict=True):
        check_row(row, transport)
    assert picture.read_bytes().startswith(b"\x89PNG")
    head, *lines = out.splitlines()
    assert head.split()[:3] == ["case", "transport", "producer"]
    assert [line.split()[1] for line in lines] == ["inproc", "shm", "gloo"]
    assert all(line.endswith("equal") for line in lines)


def check_row(row: dict[str, Any], transport: str) -> None:
    loops = {"load each"} if transport == "inproc" else {"broadcast each", "message each"}
    floors = {"inproc": "one cast", "shm": "two copies", "gloo": "raw broadcast"}
    assert (row["case"], row["transport"], row["ranks"], row["tensors"]) == ("large", transport, 1, 100)
    assert row["nbytes"] == row["tensors"] * 2 * 3 * 300  # bf16, [300, 3] at this scale
    assert row["ok"] is True
    assert row["wrong"] == []
    assert len(row["samples"]) == 2
    assert row["seconds"] > 0
    assert row["gb_per_s"] == pytest.approx(row["nbytes"] / row["seconds"] / 1e9)
    assert row["floor"] == floors[transport]
    assert row["floor_seconds"] > 0
    assert row["ratio_to_floor"] > 0
    assert set(row["baselines"]) == loops
    assert all(one["ratio"] == pytest.approx(one["seconds"] / row["seconds"]) for one in row["baselines"].values())
    assert {"begin", "go/stop", "finish"} <= set(row["stages"])
    assert row["load_average"] >= 0


def test_two_ranks_shard_and_json_on_stdout() -> None:
    command = ("--case", "large", "--transport", "shm", "--producer", "fsdp2", "--ranks", "2", "--json", "-")
    code, out, err = run("-m", "wsync.bench", *command, *SMALL)
    assert code == 0, err
    [row] = json.loads(out)["rows"]
    assert (row["producer"], row["ranks"], row["ok"]) == ("fsdp2", 2, True)
    assert {"gather each", "gather each, cast first", "broadcast each, cast first"} <= set(row["baselines"])
    assert "equal" in err


def test_a_wrong_bit_and_a_dead_rank_are_found(tmp_path: Path) -> None:
    code, out, err = run(
        "-c", SPOILED, str(tmp_path), "--case", "large", "--transport", "shm", "--no-baselines", *SMALL
    )
    assert code == 0, err
    [flipped], [killed] = (json.loads((tmp_path / f"{kind}.json").read_text())["rows"] for kind in ("flip", "kill"))
    assert flipped["ok"] is False
    assert len(flipped["wrong"]) == 1
    assert f"WRONG BYTES in 1 of 100 tensors, first {flipped['wrong'][0]}" in out
    assert killed["ok"] is False
    assert killed["seconds"] is None
    assert "died without a word" in killed["error"]
    assert "FAILED" in out
    assert [line for line in out.splitlines() if line == str(WRONG)] == [str(WRONG)] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "huge"], "unknown cases ['huge']; choose from dense-0.5b, dense-7b"),
        (["--suite", "gpu", "--case", "huge"], "unknown GPU cases ['huge']; choose from vllm-dense"),
        (["--producer", "jax"], "invalid choice: 'jax'"),
        (["--scale", "2"], "2 is not in (0, 1]"),
        (["--scale", "half"], "half is not a number"),
        (["--ranks", "0"], "0 is not a whole number of at least 1"),
        (["--transport", "pigeon"], "there is no transport 'pigeon'; choose one of"),
        (["--transport", "nccl"], "transport 'nccl' cannot be measured here: this build of torch has no nccl"),
        (["--bucket-mib", "0.001"], "bucket_bytes is 1049; it must be at least 4096 bytes"),
        (["--plot", "/nowhere/rows.png"], "there is no folder /nowhere"),
        (["--plot", "rows.doc"], "the name must end in one of"),
        (["--json", "/nowhere/rows.json"], "there is no folder /nowhere"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as end:  # how argparse leaves
        code = end.code
    assert code == MISUSED
    assert words in capsys.readouterr().err


def test_what_does_not_fit_in_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("wsync.bench.cli.free_bytes", lambda: 1 << 30)
    assert main(["--case", "dense-7b", "--scale", "1", "--transport", "shm"]) == MISUSED
    said = capsys.readouterr().err
    assert "dense-7b over shm" in said
    assert "1.1 GB are free; the scale is 1, pass a smaller --scale" in said


def test_a_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["--case", "tiny", "--plot", "rows.png"]) == MISUSED
    assert "pip install 'wsync-rl[bench]'" in capsys.readouterr().err


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        *("dense-0.5b", "dense-7b", "moe", "tiny", "large")
    ]
    assert main(["--suite", "gpu", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][:2] == ["vllm-dense", "vllm-moe"]
