"""What no sync can be faster than: to read and cast what a device needs, and what must cross links between devices."""

from collections.abc import Mapping
from math import prod

from benchmarks.scaling_layouts import Layout

Shapes = Mapping[str, tuple[int, ...]]
"""Of the weights of a checkpoint, by name."""

_WHOLE = ("norm.weight", "layernorm.weight", "mlp.gate.weight")
"""Every worker has them whole."""

_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")


def needed(shapes: Shapes, layout: Layout) -> list[int]:
    """Elements that the worker on each device reads."""
    found = [0] * (layout.ranks if not layout.apart else layout.gpus)
    for engine in range(layout.engines):
        for device in layout.places(engine):
            found[device] += sum(prod(shape) // _parts(name, layout) for name, shape in shapes.items())
    return found


def crossing(shapes: Shapes, layout: Layout) -> list[int] | None:
    """Elements of these that no rank on that device has; None where shards are not rows of each tensor.

    FSDP2 gives each rank rows: as many as `torch.chunk` does. Workers have rows too, or columns.
    """
    if layout.trainer == "zero3" or layout.apart:
        return None
    shards = layout.ranks // 2 if layout.trainer == "hsdp" else layout.ranks
    found = [0] * layout.ranks
    for engine in range(layout.engines):
        for worker, device in enumerate(layout.places(engine)):
            for name, shape in shapes.items():
                rows, columns = shape[0], prod(shape[1:])
                low, high = _rows(rows, shards, device % shards)
                first, last = (0, rows) if _kind(name) else _rows(rows, layout.tp, worker)
                width = columns // layout.tp if _kind(name) == "columns" else columns
                found[device] += (last - first - max(0, min(high, last) - max(low, first))) * width
    return found


def _kind(name: str) -> str:
    if name.endswith(_WHOLE):
        return "whole"
    return "columns" if name.endswith(_BY_COLUMNS) else ""


def _parts(name: str, layout: Layout) -> int:
    return 1 if _kind(name) == "whole" else layout.tp


def _rows(rows: int, parts: int, part: int) -> tuple[int, int]:
    """As `torch.chunk` has them."""
    each = -(-rows // parts)
    return min(rows, part * each), min(rows, (part + 1) * each)
