"""The copy kernel is compiled for a GPU, which needs none, and shows how much its instructions move at once."""

import inspect
import re

import pytest
import torch

from wsync.tiles import TILE, Kind

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from wsync import copy_kernel  # noqa: E402

TARGET = GPUTarget("cuda", 90, 32)
BYTES_AT_ONCE = 16

KINDS = [
    Kind(source, target, True, in_blocks)
    for source, target in ((torch.int64, torch.int64), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32))
    for in_blocks in (False, True)
]


def assembly(kind: Kind, several: bool) -> str:
    """PTX of the launch that `copy_kernel` makes for `kind`."""
    constants = copy_kernel.constants_of(kind, several=several)
    kernel = copy_kernel._copy_rows
    names = list(inspect.signature(kernel.fn).parameters)
    types = {"table": "*i64", "num_rows": "i32", "sources": "*i64", "targets": "*i64"}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in ("table", "sources", "targets")}
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=divisible,
    )
    compiled = triton.compile(
        source, target=TARGET, options={"num_warps": copy_kernel.warps_of(kind), "enable_fp_fusion": True}
    )
    return str(compiled.asm["ptx"])


@pytest.mark.parametrize("several", [False, True], ids=["one row", "several rows"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.source} to {kind.target}, blocks {kind.in_blocks}")
def test_what_is_aligned_moves_sixteen_bytes_at_a_time(kind: Kind, several: bool) -> None:
    code = assembly(kind, several)
    threads = 32 * copy_kernel.warps_of(kind)
    for what, dtype in (("ld", kind.source), ("st", kind.target)):
        widths = [
            int(count or 1) * int(bits) // 8
            for count, bits in re.findall(rf"\b{what}\.global(?:\.v(\d))?\.b(\d+)", code)
        ]
        assert widths.count(BYTES_AT_ONCE) == TILE * dtype.itemsize // (BYTES_AT_ONCE * threads)
        if kind.in_blocks:  # in runs the last tile is of any length
            assert set(widths) <= {BYTES_AT_ONCE, 8}, "8 bytes for words of the table"
