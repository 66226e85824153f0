"""Rows of results: what was measured against what, on which machine, kept as one JSON file a theme and day."""

import json
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import torch

from wsync.bench.machine import hardware, load_average
from wsync.bench.samples import Samples

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case, measured beside its references in one run."""

    case: str
    transport: str
    ranks: int
    """Trainer ranks."""

    tensors: int
    nbytes: int
    """Payload of one sample, in wire dtype."""

    samples: Samples
    reference: str
    """The one of `samples.references` that the target is about."""

    target: float | None = None
    """Least ratio to the reference's speed; None: reported only."""

    note: str = ""
    load_average: float = field(default_factory=load_average)
    """Processes that wanted a core in the last minute: this machine may not have been alone."""

    @property
    def ok(self) -> bool | None:
        """Whether the median ratio reaches the target."""
        return None if self.target is None else self.samples.ratio(self.reference) >= self.target

    def as_json(self) -> dict[str, object]:
        """Plain data, with every sample."""
        samples = self.samples
        plain = {name: value for name, value in asdict(self).items() if name != "samples"}
        return plain | {
            "seconds": samples.seconds,
            "median_seconds": samples.median_s,
            "gb_per_s": self.nbytes / samples.median_s / 1e9,
            "references": {
                name: {
                    "seconds": taken,
                    "median_seconds": samples.reference_median_s(name),
                    "ratio": samples.ratio(name),
                    "ratios": samples.ratios(name),
                }
                for name, taken in samples.references.items()
            },
            "ratio": samples.ratio(self.reference),
            "ok": self.ok,
        }

    def __str__(self) -> str:
        samples = self.samples
        speed = f"{1e3 * samples.median_s:9.1f} ms {self.nbytes / samples.median_s / 1e9:7.2f} GB/s"
        ratios = [f"{samples.show(name)} of {name}" for name in sorted(samples.references, key=self._reference_first)]
        verdict = "" if self.ok is None else f"  target {self.target:g}: {'ok' if self.ok else 'MISSED'}"
        return f"{self.case:<58}{speed}  {'; '.join(ratios)}{verdict}  {self.note}".rstrip()

    def _reference_first(self, name: str) -> bool:
        return name != self.reference


def versions() -> dict[str, str]:
    """Of everything that was measured; the commit has "+" if there were changes on top."""

    def git(*command: str) -> str:
        root = RESULTS.parents[1]
        return subprocess.run(["git", "-C", root, *command], capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "wsync", "adapters")
    commit = git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    return {"python": platform.python_version(), "torch": torch.__version__, "wsync": commit}


def write(theme: str, rows: list[Row], folder: Path = RESULTS) -> Path:
    """Write `<theme>_<hardware>_<date>.json` into `folder`, in place of an earlier one, and return its path."""
    machine, now = hardware(), datetime.now(timezone.utc)
    name = "-".join(str(machine["cpu"]).lower().split()) + f"-{machine['cores']}c"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{theme}_{name}_{now:%Y-%m-%d}.json"
    content = {
        "theme": theme,
        "time": now.isoformat(timespec="seconds"),
        "hardware": machine,
        "versions": versions(),
        "rows": [row.as_json() for row in rows],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
