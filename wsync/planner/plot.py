"""A picture of the phases: who takes how much, and where the GPU ends."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wsync.memory.sizes import GIB
from wsync.planner.phases import PhasePlan


def plot(plans: Sequence[PhasePlan], gpu_bytes: int, path: Path) -> None:
    """Write the picture. `path` has passed `wsync.bench.plot.check_plot`."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    phases = [plan.name for plan in plans]
    bottoms = [0.0] * len(plans)
    colors = colormaps["tab20"]
    for number, name in enumerate(dict.fromkeys(name for plan in plans for name in plan.residents)):
        heights = [plan.residents.get(name, 0) / GIB for plan in plans]
        axes.bar(phases, heights, bottom=bottoms, label=name, color=colors(number % colors.N), width=0.6)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.axhline(gpu_bytes / GIB, color="black", linestyle="--", label="the GPU")
    axes.set_ylabel("GiB on each GPU")
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path)
