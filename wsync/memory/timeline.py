"""A picture of a ledger: memory over time, the phases behind it, and what was on the device."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from wsync.errors import ConfigError
from wsync.extras import importing
from wsync.memory.ledger import Ledger
from wsync.memory.sizes import GIB

_LINES = (("device used", "black", ":"), ("reserved", "tab:red", "--"), ("allocated", "tab:blue", "-"))
_PHASES = (
    *("#f2f2f2", "#fff2cc", "#dcebf7", "#e4f2dc", "#f9dfdc", "#ebe0f3"),
    *("#d5f0ee", "#fbe3c8", "#e9e4d4", "#f7d9ea", "#dde0ee", "#edf3b8"),
)
"""As many as a trainer with four phases has, ways between them included, and some more."""
_LAST = 0.04
"""Width of the last entry, which has no end, as a share of the time up to it."""
_NAMED = 0.02
"""Narrowest span that gets its name, as a share of the whole width."""


def plot(ledger: Ledger, path: str | Path) -> None:
    """Write the picture of what `ledger` keeps. See `plot_rows`."""
    plot_rows(ledger.to_json()["entries"], path)


def plot_rows(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Write the picture of entries that were written to JSON, by this process or another.

    Args:
        rows: the "entries" of `Ledger.to_json`.
        path: of the file; its ending says which format.

    Raises `UnsupportedError` without matplotlib, and `ConfigError` for an unknown ending or no rows.
    """
    with importing("bench", "a picture of a ledger"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    known = FigureCanvasAgg.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in known:
        raise ConfigError(f"{path}: the name of the picture must end in one of {', '.join(sorted(known))}")
    if not rows:
        raise ConfigError(f"{path}: nothing has been recorded, so that there is nothing to draw")
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    times = [row["seconds"] for row in rows]
    times.append(times[-1] + max(_LAST * (times[-1] - times[0]), 1e-3))
    _residents(axes, rows, times)
    _usage(axes, rows, times)
    _phases(axes, rows, times)
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the ledger began")
    axes.set_ylabel("GiB")
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path)


def _residents(axes: Any, rows: Sequence[Mapping[str, Any]], times: Sequence[float]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row["residents_bytes"]))
    heights = [_held([row["residents_bytes"].get(name, 0) for row in rows]) for name in names]
    colors = [f"C{index}" for index in range(len(names))]
    if names:
        axes.stackplot(times, *heights, labels=names, colors=colors, step="post", alpha=0.5)


def _usage(axes: Any, rows: Sequence[Mapping[str, Any]], times: Sequence[float]) -> None:
    values = (
        [row["total_bytes"] - row["free_bytes"] for row in rows],
        [row["reserved_bytes"] for row in rows],
        [row["allocated_bytes"] for row in rows],
    )
    for (label, color, style), nbytes in zip(_LINES, values, strict=True):
        axes.plot(times, _held(nbytes), label=label, color=color, linestyle=style, drawstyle="steps-post")


def _phases(axes: Any, rows: Sequence[Mapping[str, Any]], times: Sequence[float]) -> None:
    """A colour each, named in the legend, and above its spans where there is room for the name."""
    spans: dict[str, list[tuple[float, float]]] = {}
    begin = 0
    for phase, group in groupby(row["phase"] for row in rows):
        end = begin + len(list(group))
        spans.setdefault(phase, []).append((times[begin], times[end] - times[begin]))
        begin = end
    everywhere = axes.get_xaxis_transform()
    for number, (phase, some) in enumerate(spans.items()):
        color = _PHASES[number % len(_PHASES)]
        axes.broken_barh(some, (0, 1), transform=everywhere, color=color, linewidth=0, label=phase, zorder=0)
        for left, width in some:
            if width >= _NAMED * (times[-1] - times[0]):
                axes.text(left, 1.01, phase, transform=everywhere, rotation=45, fontsize=8)


def _held(nbytes: Sequence[int]) -> list[float]:
    """In GiB, and the last value once more: it holds to the right edge."""
    return [one / GIB for one in (*nbytes, nbytes[-1])]
