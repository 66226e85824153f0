"""Results as a table and as a picture, both from the JSON alone.

    python -m wsync.bench.picture RESULTS.json... [--out PICTURE] [--into PAGE]

The table goes to stdout, or into a page, between `<!-- measured: RESULTS.json... -->` and `<!-- measured: end -->`.
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wsync.bench.plot import check_plot
from wsync.bench.results import Kind, Measured, Run, read
from wsync.errors import ConfigError, WsyncError

MISUSED = 2
"""Exit code: the arguments make no sense, or matplotlib is not there."""

PLACE = re.compile(r"<!-- measured: (?P<files>\S.*?\.json) -->\n(?P<table>.*?)<!-- measured: end -->", re.DOTALL)
"""Where a page has the table of the files that it names."""

_COLORS = {Kind.WSYNC: "tab:blue", Kind.FLOOR: "tab:gray", Kind.RIVAL: "tab:orange"}
_LOG_FROM = 20
"""Longest over shortest: from here on short bars would not be seen on a linear axis."""

_ROW_INCHES = 0.21
_HEADS = ("case", "measured in turn", "ms", "wsync takes, times as long")


def main(argv: Sequence[str] | None = None) -> int:
    """Write what was asked for. Returns 0, or `MISUSED` with a message."""
    options = _parser().parse_args(argv)
    try:
        if options.out:
            check_plot(options.out, "--out")
        runs = [read(path) for path in options.results]
        if options.into:
            _put(options.into, options.results, markdown(runs))
    except WsyncError as error:
        print(f"python -m wsync.bench.picture: {error}", file=sys.stderr)
        return MISUSED
    if not options.into:
        print(markdown(runs), end="")
    if options.out:
        draw(runs, options.out)
    return 0


def markdown(runs: Sequence[Run]) -> str:
    """A table for each run, in Markdown."""
    return "\n".join(_table(run) for run in runs)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the picture: axes for each run, a group of bars for each case. `path` has passed `check_plot`."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [sum(len(one.bars) + 2 for one in run.measured) for run in runs]
    figure = Figure(figsize=(10, 0.9 * len(runs) + _ROW_INCHES * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "wsync (blue), bare copies or broadcasts of the same bytes (grey), other ways (orange), in one run", fontsize=9
    )
    drawn: Any = figure.subplots(len(runs), 1, squeeze=False, height_ratios=[max(1, height) for height in heights])
    for [axes], run in zip(drawn, runs, strict=True):
        _bars(axes, run)
    with rc_context({"svg.hashsalt": "wsync"}):  # the same results make the same file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(axes: Any, run: Run) -> None:
    place, names, places = 0.0, list[str](), list[float]()
    for one in run.measured:
        axes.text(
            0.005, place, one.title, transform=axes.get_yaxis_transform(), fontsize=8, fontweight="bold", va="center"
        )
        for bar in one.bars:
            place -= 1
            faint = bar is one.copies
            axes.barh(place, 1e3 * bar.seconds, color=_COLORS[bar.kind], alpha=0.5 if faint else 1.0)
            axes.text(1e3 * bar.seconds, place, f" {_ms(bar.seconds)}", fontsize=7, va="center")
            names.append(bar.name)
            places.append(place)
        place -= 2
    axes.set_yticks(places, names, fontsize=7)
    axes.set_ylim(place + 1, 1)
    seconds = [bar.seconds for one in run.measured for bar in one.bars]
    if seconds and max(seconds) > _LOG_FROM * min(seconds):
        axes.set_xscale("log")
        axes.set_xlim(left=10 ** math.floor(math.log10(1e3 * min(seconds))))
    axes.set_xlabel("ms, median", fontsize=8)
    axes.set_title(run.about, fontsize=8, loc="left")


def _table(run: Run) -> str:
    lines = [f"{run.about}:", "", f"| {' | '.join(_HEADS)} |", "|---|---|--:|--:|"]
    for one in run.measured:
        titles = [one.title] + [""] * (len(one.bars) - 1)
        for title, bar in zip(titles, one.bars, strict=True):
            lines.append(f"| {title} | {bar.name} | {_ms(bar.seconds)} | {_ratio(one, bar.kind, bar.seconds)} |")
    if run.left_out:
        lines += ["", f"Left out, because a check failed: {', '.join(run.left_out)}."]
    return "\n".join([*lines, ""])


def _ratio(one: Measured, kind: Kind, seconds: float) -> str:
    """How many times as long wsync takes, and its copies alone."""
    if kind is Kind.WSYNC:
        return ""
    whole = f"{one.whole.seconds / seconds:.2f}"
    return f"{whole}; copies {one.copies.seconds / seconds:.2f}" if one.copies else whole


def _ms(seconds: float) -> str:
    """Three digits or more."""
    return f"{1e3 * seconds:.{1 if seconds < 0.1 else 0}f}"


def _put(page: Path, results: Sequence[Path], table: str) -> None:
    """Raises `ConfigError` if the page has no place for it, or more than one."""
    text = page.read_text() if page.is_file() else ""
    files = " ".join(path.as_posix() for path in results)
    places = [place for place in PLACE.finditer(text) if place["files"] == files]
    if len(places) != 1:
        raise ConfigError(f"--into {page}: it has {len(places)} places that begin with <!-- measured: {files} -->")
    start, end = places[0].span("table")
    page.write_text(f"{text[:start]}\n{table}\n{text[end:]}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m wsync.bench.picture",
        description="Show results of the bench: wsync, bare copies, and other ways, case by case.",
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json", help="what --json has written")
    parser.add_argument("--out", type=Path, metavar="PICTURE", help="draw it; .png, .svg or .pdf")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the table between its two marks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
