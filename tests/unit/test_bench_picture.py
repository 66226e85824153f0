"""Results as a table and as a picture: what pages show is what the JSON says, and what failed is not shown."""

import html
import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from wsync.bench import machine
from wsync.bench.picture import MISUSED, PLACE, main, markdown
from wsync.bench.results import Kind, read

ROOT = Path(__file__).parents[2]
PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if PLACE.search(page.read_text())
]
MACHINE = {
    "time": "2026-11-30T13:53:51+00:00",
    "hardware": {"cpu": "Some CPU", "cores": 4, "memory_bytes": 8 << 30, "gpus": ["Some GPU", "Some GPU"]},
    "versions": {"python": "3.12.3", "wsync": "not installed"},
}
RIGHT = {
    "case": "vllm-dense",
    "nbytes": 15_200_000_000,
    "checks": {"tokens": True},
    "seconds": 0.009,
    "references": {"load_weights": {"seconds": 0.09}, "device copy": {"seconds": 0.0072}},
}
PULLED = {**RIGHT, "case": "vllm-pull", "data samples": [0.008, 0.0078, 0.009]}
WRONG = {**RIGHT, "case": "vllm-nccl-rivals", "checks": {"tokens": True, "tokens of push each": False}}
HOST = {
    "case": "tiny",
    "transport": "shm",
    "producer": "module",
    "ranks": 1,
    "nbytes": 2_000_000,
    "load_average": 1.53,
    "seconds": 0.2,
    "ok": True,
    "wrong": [],
    "error": "",
    "ceilings": {"raw broadcast": {"seconds": 0.1}},
    "baselines": {"message each": {"seconds": 0.4}},
}
THEME = {
    "case": "in process",
    "transport": "inproc",
    "nbytes": 10,
    "ok": False,
    "target": 0.9,
    "seconds": [0.3, 0.2, 0.4],
    "median_seconds": 0.3,
    "references": {"memcpy": {"seconds": [0.2, 0.2, 0.2, 0.2], "median_seconds": 0.2}},
}


def written(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "results.json"
    path.write_text(json.dumps({**MACHINE, "rows": rows}))
    return path


def words_of(picture: Path) -> str:
    """Text in an SVG; matplotlib draws each word as outlines below a comment that says it."""
    return html.unescape(picture.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_say_what_the_results_say(page: Path) -> None:
    for place in PLACE.finditer(page.read_text()):
        made = markdown([read(ROOT / name) for name in place["files"].split()])
        assert place["table"].strip() == made.strip(), (
            f"python -m wsync.bench.picture {place['files']} --into {page.name}"
        )


def test_readme_has_the_peers_and_its_picture_is_of_the_same_numbers() -> None:
    readme = (ROOT / "README.md").read_text()
    place = PLACE.search(readme)
    assert place is not None
    assert "](docs/measured.svg)" in readme
    words = words_of(ROOT / "docs" / "measured.svg")
    for run in (read(ROOT / name) for name in place["files"].split()):
        assert f"<!-- {run.about} -->" in words
        for one in run.measured:
            assert f"<!-- {one.title} -->" in words
            for bar in one.bars:
                assert f"<!-- {bar.name} -->" in words
                assert f"<!--  {1e3 * bar.seconds:.{1 if bar.seconds < 0.1 else 0}f} -->" in words


def test_a_row_for_each_thing_that_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(written(tmp_path, RIGHT, PULLED))]) == 0
    about, _, _, _, *lines = capsys.readouterr().out.splitlines()
    assert about == "2 x Some GPU, 4 cores of Some CPU, 8 GiB, python 3.12.3, 2026-11-30:"
    assert lines == [
        "| module to vLLM in one process, dense 7B, bf16, 15.2 GB | wsync | 9.0 |  |",
        "|  | one copy on the device | 7.2 | 1.25 |",
        "|  | vLLM's load_weights, called directly | 90.0 | 0.10 |",
        "| another process to vLLM, dense 7B, pulled, 15.2 GB | wsync | 9.0 |  |",
        "|  | wsync, its copies alone | 8.0 |  |",
        "|  | one copy on the device | 7.2 | 1.25; copies 1.11 |",
        "|  | vLLM's load_weights, called directly | 90.0 | 0.10; copies 0.09 |",
    ]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (WRONG, "vllm-nccl-rivals (tokens of push each)"),
        ({**RIGHT, "checks": {}}, "vllm-dense (nothing was checked)"),
        ({"case": "vllm-dense", "ok": False, "error": "ended with 1:\nlog"}, "vllm-dense (ended with 1:)"),
        ({**HOST, "wrong": ["a", "b"]}, "tiny (2 tensors are wrong)"),
        ({**HOST, "seconds": None, "error": "no memory"}, "tiny (no memory)"),
    ],
)
def test_what_failed_is_named_and_not_shown(row: dict[str, Any], why: str, tmp_path: Path) -> None:
    [run] = [read(written(tmp_path, PULLED, row))]
    assert [one.title for one in run.measured] == ["another process to vLLM, dense 7B, pulled, 15.2 GB"]
    assert markdown([run]).endswith(f"\nLeft out, because a check failed: {why}.\n")


def test_a_missed_target_of_speed_is_shown(tmp_path: Path) -> None:
    run = read(written(tmp_path, THEME, {"case": "vllm-200", "checks": {"tokens": False}}))
    [one] = run.measured
    assert (one.title, one.whole.seconds, one.others[0].kind) == ("in process, 1e-08 GB", 0.3, Kind.FLOOR)
    assert run.left_out == ()  # the other one has no times


def test_rows_of_the_host_suite(tmp_path: Path) -> None:
    run = read(written(tmp_path, HOST))
    [one] = run.measured
    assert one.title == "tiny over shm, module, 1 rank(s), 0.002 GB"
    assert [(bar.name, bar.kind) for bar in one.others] == [("raw broadcast", Kind.FLOOR), ("message each", Kind.RIVAL)]
    assert "load average up to 1.5" in run.about


def test_the_axis_is_logarithmic_where_short_bars_would_not_be_seen(tmp_path: Path) -> None:
    picture = tmp_path / "rows.svg"
    assert main([str(written(tmp_path, RIGHT)), "--out", str(picture)]) == 0
    assert "10^{" not in words_of(picture)
    slow = {**RIGHT, "references": {"load_weights": {"seconds": 0.2}}}
    assert main([str(written(tmp_path, slow)), "--out", str(picture)]) == 0
    assert "10^{" in words_of(picture)
    before = picture.read_bytes()
    assert main([str(written(tmp_path, slow)), "--out", str(picture)]) == 0
    assert picture.read_bytes() == before


def test_into_the_one_place_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, page = written(tmp_path, RIGHT), tmp_path / "page.md"
    page.write_text(f"above\n<!-- measured: {results.as_posix()} -->\nold\n<!-- measured: end -->\nbelow\n")
    for _ in range(2):
        assert main([str(results), "--into", str(page)]) == 0
    assert capsys.readouterr().out == ""
    text = page.read_text()
    assert text.startswith("above\n<!-- measured: ")
    assert text.endswith("\n\n<!-- measured: end -->\nbelow\n")
    assert text.count("| wsync | 9.0 |") == 1
    assert "old" not in text
    page.write_text("nothing")
    assert main([str(results), "--into", str(page)]) == MISUSED
    assert "it has 0 places that begin with <!-- measured: " in capsys.readouterr().err


def test_what_cannot_be_read_or_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.json").write_text('{"rows": []}')
    for name in ("none.json", "other.json"):
        assert main([str(tmp_path / name)]) == MISUSED
        assert "not a file that the bench wrote" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main([str(written(tmp_path, RIGHT)), "--out", str(tmp_path / "rows.svg")]) == MISUSED
    error = capsys.readouterr().err
    assert "--out cannot import what it needs" in error
    assert "pip install 'wsync-rl[bench]'" in error


def test_versions_of_engines_and_rivals_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"vllm": "0.26.0", "wsync-rl": "0.1.0"}

    def version(name: str) -> str:
        if name not in here:
            raise PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(machine, "version", version)
    assert machine.versions().items() >= {"vllm": "0.26.0", "wsync": "0.1.0"}.items()
    assert "sglang" not in machine.versions()
    here.clear()
    assert machine.versions()["wsync"] == "not installed"
