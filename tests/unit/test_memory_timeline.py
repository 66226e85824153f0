"""The picture of a ledger."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from wsync.errors import ConfigError, UnsupportedError
from wsync.memory.host_device import HostDevice
from wsync.memory.ledger import Ledger
from wsync.memory.timeline import plot, plot_rows

GIB = 1 << 30


@pytest.fixture
def ledger() -> Ledger:
    """Three phases on the memory of this machine."""
    made = Ledger(HostDevice())
    for phase, residents in (("rollout", {"engine": GIB}), ("train", {"actor": GIB, "adamw": 2 * GIB}), ("sync", {})):
        made.record(phase, "entered", residents)
        made.record(phase, "left", residents)
    return made


def words(path: Path) -> str:
    """Text in an SVG; matplotlib draws each word as outlines below a comment that says it."""
    return " ".join(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if "<!--" in line)


def test_the_picture_names_all_that_it_shows(ledger: Ledger, tmp_path: Path) -> None:
    plot(ledger, tmp_path / "memory.svg")
    shown = words(tmp_path / "memory.svg")
    for name in ("allocated", "reserved", "device used", "rollout", "train", "sync", "engine", "actor", "adamw", "GiB"):
        assert f"<!-- {name} -->" in shown


def test_another_process_can_draw_it(ledger: Ledger, tmp_path: Path) -> None:
    ledger.write_json(tmp_path / "ledger.json")
    rows = json.loads((tmp_path / "ledger.json").read_text(encoding="utf-8"))["entries"]
    plot_rows(rows, tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def rows(*phases: tuple[float, str, int]) -> Sequence[dict[str, Any]]:
    return [
        {
            "seconds": seconds,
            "phase": phase,
            "total_bytes": 8 * GIB,
            "free_bytes": 8 * GIB - used,
            "reserved_bytes": used,
            "allocated_bytes": used,
            "residents_bytes": {"actor": used} if used else {},
        }
        for seconds, phase, used in phases
    ]


def test_one_entry_is_enough_and_short_phases_are_named_once(tmp_path: Path) -> None:
    plot_rows(rows((0.0, "train", 0)), tmp_path / "one.svg")
    assert words(tmp_path / "one.svg").count("<!-- train -->") == 2
    plot_rows(rows((0.0, "train", GIB), (10.0, "sync", 0), (10.01, "train", GIB)), tmp_path / "short.svg")
    shown = words(tmp_path / "short.svg")
    assert shown.count("<!-- sync -->") == 1
    assert shown.count("<!-- train -->") == 3


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nothing has been recorded"):
        plot_rows([], tmp_path / "none.svg")
    with pytest.raises(ConfigError, match=r"must end in one of .*svg"):
        plot_rows(rows((0.0, "train", GIB)), tmp_path / "memory.doc")
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'wsync-rl\[bench\]'"):
        plot_rows(rows((0.0, "train", GIB)), tmp_path / "memory.svg")
    assert list(tmp_path.iterdir()) == []


def test_drawing_needs_no_pyplot_and_chooses_no_backend(tmp_path: Path) -> None:
    program = f"""
import sys
from wsync.memory.timeline import plot_rows
assert "matplotlib" not in sys.modules
plot_rows({rows((0.0, "train", GIB))!r}, {str(tmp_path / "one.svg")!r})
import matplotlib
assert "matplotlib.pyplot" not in sys.modules
assert dict.__getitem__(matplotlib.rcParams, "backend") is matplotlib.rcsetup._auto_backend_sentinel
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "one.svg").exists()
