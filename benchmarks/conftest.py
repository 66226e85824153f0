"""How the benchmarks run: full size by default, written down and held to their targets.

Nothing is written with `--small`, which only tries them, nor with `-k`.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from benchmarks.record import Row, write


@dataclass(slots=True)
class Record:
    """Rows of this run by theme."""

    small: bool
    rows: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))


_RECORD = pytest.StashKey[Record]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--small`."""
    parser.addoption("--small", action="store_true", help="small inputs; nothing is written, no target is checked")


def pytest_configure(config: pytest.Config) -> None:
    """One record a run."""
    config.stash[_RECORD] = Record(small=config.getoption("--small"))


@pytest.fixture
def small(request: pytest.FixtureRequest) -> bool:
    """Whether inputs should be small."""
    return request.config.stash[_RECORD].small


@pytest.fixture
def keep(request: pytest.FixtureRequest) -> Callable[[Row], None]:
    """Keep a row under the theme of the module, then fail if it misses its target."""
    record = request.config.stash[_RECORD]
    theme = request.module.__name__.rpartition(".")[2].removeprefix("test_")

    def keep_row(row: Row) -> None:
        record.rows[theme].append(replace(row, target=None) if record.small else row)
        assert record.small or row.ok is not False, str(row)

    return keep_row


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A test may set the number of torch's threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show the ratios, and write full-size results down."""
    record = config.stash[_RECORD]
    for theme, rows in record.rows.items():
        terminalreporter.section(f"{theme}: speed against references, median (lowest to highest)")
        for row in rows:
            terminalreporter.write_line(str(row))
        if not record.small and not config.getoption("keyword"):
            terminalreporter.write_line(f"written to {os.path.relpath(write(theme, rows))}")
