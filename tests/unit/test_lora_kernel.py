"""The kernel that merges LoRA on a GPU: what it computes in Triton's interpreter, and on a device if there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wsync.adapters.trainers.exchange import Layout
from wsync.adapters.trainers.lora_layers import Term
from wsync.adapters.trainers.lora_merge import merge
from wsync.regions import Region

pytest.importorskip("triton")

TIMEOUT_S = 120
SIZES = [(70, 130, 16), (5, 3, 4), (64, 256, 33)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROOT = Path(__file__).resolve().parents[2]


def compare() -> None:
    """Program: the interpreter works on host memory."""
    from contextlib import nullcontext
    from unittest.mock import patch

    from wsync.adapters.trainers.lora_kernel import add_product

    generator = torch.Generator().manual_seed(0)
    with patch.object(torch.cuda, "device", lambda device: nullcontext()):
        for (rows, columns, rank), dtype in zip(SIZES, DTYPES, strict=True):
            base = torch.randn(rows, columns, generator=generator).to(dtype)
            left = torch.randn(rank, rows, generator=generator).T
            right = torch.randn(rank, columns, generator=generator)
            out = torch.full((rows, columns), torch.nan)
            add_product(base, left, right, 0.5, out)
            torch.testing.assert_close(out, base.float() + 0.5 * (left @ right), rtol=1e-6, atol=1e-5)
            again = base.float()
            add_product(again, left, right, 0.5, again)
            assert torch.equal(again, out), "in place"


def test_it_computes_what_torch_does() -> None:
    program = "from tests.unit.test_lora_kernel import compare; compare()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, timeout=TIMEOUT_S, check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [4, 16, 48])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_a_weight_on_a_device(dtype: torch.dtype, rank: int, transposed: bool) -> None:
    """Rows 3 to 100 of a weight; two adapters."""
    rows, columns = 128, 264
    whole = torch.randn(rows, columns, device="cuda").to(dtype)
    box = Region.box((rows, columns), (3, 0), (97, columns))
    layout = Layout(shape=(rows, columns), dtype=dtype, region=box, memory=Region.whole((97, columns)))
    outputs, inputs = (columns, rows) if transposed else (rows, columns)
    factors = {
        name: torch.randn(shape, device="cuda")
        for name, shape in (("b", (outputs, rank)), ("a", (rank, inputs)), ("d", (outputs, 8)), ("c", (8, inputs)))
    }
    terms = [
        Term(adapter=b + a, b=b, a=a, transposed=transposed, scaling=scaling)
        for b, a, scaling in (("b", "a", 2.0), ("d", "c", 0.5))
    ]
    expected = whole.double()
    for term in terms:
        assert term.a is not None
        product = term.scaling * factors[term.b].double() @ factors[term.a].double()
        expected += product.T if transposed else product
    local = whole[3:100].clone()
    before = local.clone()

    found = merge(local, layout, terms, factors)

    torch.testing.assert_close(found.double(), expected[3:100], rtol=1e-6, atol=1e-4)
    assert found.dtype == torch.float32
    assert torch.equal(local, before)
