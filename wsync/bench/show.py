"""Progress on stderr and a table on stdout: with rich on a terminal, plain text everywhere else."""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from wsync.bench.job import Job, Row
from wsync.bench.run import OnProgress
from wsync.config import MIB

_HEADS = ("case", "transport", "producer", "ranks", "bucket", "tensors", "MiB", "ms", "GB/s", "x floor", "floor")
_NUMBERS = ("ranks", "bucket", "tensors", "MiB", "ms", "GB/s", "x floor")


class Progress:
    """Says what is measured now. One line a row where nobody watches."""

    def start(self, job: Job, number: int, total: int) -> OnProgress:
        """A row begins; call what is returned as it goes on."""
        print(f"[{number}/{total}] {job}", file=sys.stderr, flush=True)
        return lambda doing, done, steps: None


@contextmanager
def progress() -> Iterator[Progress]:
    """A live bar if stderr is a terminal and rich is there."""
    if not _rich(sys.stderr):
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[doing]}"), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True)) as bars:

        class Live(Progress):
            def start(self, job: Job, number: int, total: int) -> OnProgress:
                """One bar a row."""
                task = bars.add_task(f"[{number}/{total}] {job}".replace("[", "\\["), total=None, doing="starting")
                return lambda doing, done, steps: bars.update(task, doing=doing, completed=done, total=steps)

        yield Live()


def table(rows: Sequence[Row], out: TextIO) -> None:
    """All rows, and below them what failed and what went wrong."""
    heads = [*_HEADS, "baselines: x as long", "bytes"]
    lines = [_cells(row) for row in rows]
    if _rich(out):
        from rich.console import Console
        from rich.table import Table

        shown = Table(row_styles=("", "dim"))
        for head in heads:
            shown.add_column(head, justify="right" if head in _NUMBERS else "left")
        for line in lines:
            shown.add_row(*line)
        Console(file=out).print(shown)
    else:
        _plain(heads, lines, out)
    for note in notes(rows):
        print(note, file=out)


def notes(rows: Sequence[Row]) -> list[str]:
    """A line for each row that is not right, and how tiny tensors compare with large ones."""
    found = [f"{row.job}: failed\n{row.error}" for row in rows if row.error]
    for row in rows:
        if row.taken is not None and row.taken.wrong:
            wrong = row.taken.wrong
            found.append(f"{row.job}: WRONG BYTES in {len(wrong)} of {len(row.job.shapes)} tensors, first {wrong[0]}")
    return found + [
        f"{where}: tiny costs {ratio:.2f} times as long a byte as large" for where, ratio in tiny_to_large(rows)
    ]


def tiny_to_large(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """For each tiny row that has a large one of the same kind: what they are, and time a byte over time a byte."""
    by_kind = {(row.job.case, _kind(row.job)): row for row in rows}
    found = []
    for (case, kind), row in by_kind.items():
        other = by_kind.get(("large", kind))
        if case == "tiny" and other is not None and row.ns_per_byte is not None and other.ns_per_byte is not None:
            found.append((f"{kind[0]}, {kind[1]}, {kind[2]} rank(s)", row.ns_per_byte / other.ns_per_byte))
    return found


def _kind(job: Job) -> tuple[str, str, int, int, float]:
    return job.transport, job.producer, job.ranks, job.bucket_bytes, job.scale


def _cells(row: Row) -> list[str]:
    job = row.job
    cells = [job.case, job.transport, job.producer, str(job.ranks), f"{job.bucket_bytes / MIB:g}"]
    cells += [f"{len(job.shapes)}", f"{job.nbytes / MIB:.1f}"]
    if row.taken is None:
        return [*cells, "-", "-", "-", job.floor, "", "FAILED"]
    seconds = row.taken.samples.median_s
    cells += [f"{1e3 * seconds:.1f}", f"{job.nbytes / seconds / 1e9:.2f}", f"{row.ratio_to_floor:.2f}", job.floor]
    cells.append("; ".join(f"{name} {one['ratio']:.1f}" for name, one in row.baselines.items()))
    return [*cells, "equal" if row.ok else "WRONG"]


def _plain(heads: Sequence[str], lines: Sequence[Sequence[str]], out: TextIO) -> None:
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    right = [head in _NUMBERS for head in heads]
    for line in (heads, *lines):
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ]
        print("  ".join(cells).rstrip(), file=out)


def _rich(stream: TextIO) -> bool:
    return stream.isatty() and importlib.util.find_spec("rich") is not None
