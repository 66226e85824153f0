"""A picture of the rows: GB/s of each sync, of its floor, and of the loops beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wsync.bench.job import Row
from wsync.errors import ConfigError
from wsync.extras import importing

_BAR_INCHES = 0.24


def check_plot(path: Path, option: str = "--plot") -> None:
    """Before anything is measured: raises `UnsupportedError` without matplotlib, `ConfigError` for a bad path."""
    with importing("bench", option):
        from matplotlib.backends.backend_agg import FigureCanvasAgg

    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"{option} {path}: the name must end in one of {', '.join(sorted(known))}")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write the picture. Rows that failed are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = [bar for row in rows for bar in _bars(row)]
    figure = Figure(figsize=(9, 1.5 + _BAR_INCHES * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    places = range(len(bars), 0, -1)
    axes.barh(places, [speed for _, speed, _ in bars], color=[color for _, _, color in bars])
    axes.set_yticks(places, [name for name, _, _ in bars], fontsize=7)
    axes.set_xlabel("GB/s of payload in wire dtype, median")
    axes.set_title("wsync (blue), its floor (grey), loops of one parameter after the other (orange)", fontsize=9)
    figure.savefig(path)


def _bars(row: Row) -> list[tuple[str, float, str]]:
    """Name, GB/s and colour."""
    if row.taken is None:
        return []
    job, samples = row.job, row.taken.samples
    found = [
        (str(job), samples.median_s, "tab:blue"),
        (job.floor, samples.reference_median_s(job.floor), "tab:gray"),
        *((name, one["seconds"], "tab:orange") for name, one in row.baselines.items()),
    ]
    return [(name, job.nbytes / seconds / 1e9, color) for name, seconds, color in found]
