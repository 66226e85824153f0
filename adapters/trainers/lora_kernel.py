"""`base + scaling * left @ right` on a GPU in one pass over the base. Needs Triton, as CUDA builds of torch do."""

from typing import Any

import torch
import triton
import triton.language as tl

_ROWS, _COLUMNS, _RANKS = 64, 128, 16
"""Of one program, and of what it multiplies at a time."""

_WARPS = 8


def add_product(base: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scaling: float, out: torch.Tensor) -> None:
    """Queue it on the current stream; products and sums are in float32, and the last sum is rounded once.

    Args:
        base: contiguous, `[rows, columns]`, of 16 or 32 bits.
        left, right: `[rows, rank]` and `[rank, columns]` with any strides.
        scaling: of the product.
        out: float32, contiguous, like `base`, which it may be itself.
    """
    (rows, columns), rank = base.shape, left.shape[1]
    programs = -(-rows // _ROWS) * -(-columns // _COLUMNS)
    with torch.cuda.device(out.device):
        _add_product[(programs,)](
            base,
            left,
            right,
            scaling,
            out,
            rows,
            columns,
            rank,
            *left.stride(),
            *right.stride(),
            **constants(),
            num_warps=_WARPS,
        )


def constants() -> dict[str, Any]:
    """What the kernel is compiled with."""
    return {"tile_rows": _ROWS, "tile_columns": _COLUMNS, "tile_ranks": _RANKS}


@triton.jit  # type: ignore[untyped-decorator]
def _add_product(  # type: ignore[no-untyped-def]
    base,
    left,
    right,
    scaling,
    out,
    rows,
    columns,
    rank,
    left_row,
    left_rank,
    right_rank,
    right_column,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    tile_ranks: tl.constexpr,
):
    across = tl.cdiv(columns, tile_columns)
    row = (tl.program_id(0) // across).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    column = (tl.program_id(0) % across) * tile_columns + tl.arange(0, tile_columns)[None, :]
    product = tl.zeros((tile_rows, tile_columns), tl.float32)
    for first in range(0, rank, tile_ranks):
        across_rank, down_rank = first + tl.arange(0, tile_ranks)[None, :], first + tl.arange(0, tile_ranks)[:, None]
        lefts = tl.load(
            left + row * left_row + across_rank * left_rank, mask=(row < rows) & (across_rank < rank), other=0.0
        )
        rights = tl.load(
            right + down_rank * right_rank + column * right_column,
            mask=(down_rank < rank) & (column < columns),
            other=0.0,
        )
        product = tl.dot(lefts.to(tl.float32), rights.to(tl.float32), product, input_precision="ieee")
    at = row * columns + column
    inside = (row < rows) & (column < columns)
    tl.store(out + at, tl.load(base + at, mask=inside).to(tl.float32) + product * scaling, mask=inside)
