"""Pictures."""

from collections.abc import Sequence
from pathlib import Path


def length_histogram(lengths: Sequence[int], longest: int, path: Path) -> None:
    """How long answers are, in tokens: `longest` is the most that one may have."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    axes.hist(lengths, bins=min(longest, 50), range=(0.5, longest + 0.5))
    axes.set_xlabel("tokens of an answer")
    axes.set_ylabel("answers")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
