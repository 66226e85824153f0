"""`benchmarks.scaling`: layouts that fit, what must be read and must cross, and one of them on CPUs."""

import json
from math import prod
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.scaling_floors import crossing, needed
from benchmarks.scaling_layouts import Layout, layouts
from wsync.bench.gpu.models import DENSE

SHAPES = {
    "model.embed_tokens.weight": (64, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 16),
    "model.layers.0.input_layernorm.weight": (8,),
}
ROWS, COLUMNS, NORM = 64 * 8 + 16 * 8, 8 * 16, 8


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_layouts_fit_on_their_gpus(gpus: int) -> None:
    found = layouts(gpus)
    assert len({layout.name for layout in found}) == len(found)
    for layout in found:
        assert layout.gpus == gpus
        places = [place for engine in range(layout.engines) for place in layout.places(engine)]
        assert len(set(places)) == len(places) == layout.tp * layout.engines
        assert max(places) < gpus
        assert all(owner < layout.ranks for owner in layout.owners)
        assert layout.apart == (min(places) >= layout.ranks)


def test_what_two_workers_need_and_what_crosses() -> None:
    """Rows lie where they are needed; of columns each worker needs half, and half of that lies on the other device."""
    both = Layout(name="both", ranks=2, tp=2)
    assert needed(SHAPES, both) == [ROWS // 2 + COLUMNS // 2 + NORM] * 2
    assert crossing(SHAPES, both) == [COLUMNS // 4 + NORM // 2] * 2


def test_an_engine_on_each_device_reads_all_that_is_on_others() -> None:
    each = Layout(name="each", ranks=4, tp=1, engines=4)
    whole = sum(map(prod, SHAPES.values()))
    assert needed(SHAPES, each) == [whole] * 4
    assert crossing(SHAPES, each) == [whole - whole // 4] * 4


def test_copies_of_shards_are_read_in_the_nearer_half() -> None:
    """Ranks 0 and 1 have all rows between them, and so have 2 and 3; a worker's quarter lies on one of them."""
    found = crossing({"q_proj.weight": (16, 8)}, Layout(name="hsdp", ranks=4, tp=4, trainer="hsdp"))
    assert found == [0, 32, 32, 0]


def test_where_shards_are_no_rows_nobody_says_what_crosses() -> None:
    assert crossing(SHAPES, Layout(name="zero3", ranks=2, tp=2, trainer="zero3")) is None
    assert crossing(SHAPES, Layout(name="apart", ranks=2, tp=2, apart=True)) is None


def test_an_unknown_layout_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.main(["--small", "--gpus", "2", "--layout", "tp3"]) == 2
    assert "no layout tp3 on 2 GPUs; choose from fsdp2-2-tp2-pull, " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.vllm
@pytest.mark.parametrize("layout", [layout.name for layout in layouts(2) if layout.shape == DENSE])
def test_a_layout_on_cpus(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    code = scaling.main(["--small", "--gpus", "2", "--layout", layout, "--json", str(file), "--timeout-s", "240"])
    assert code == 0, capsys.readouterr().out  # experts that vLLM's CPU build packs cannot be pulled: no MoE here
    [row] = json.loads(file.read_text())["rows"]
    assert len(row["checks"]) == 3
    assert len(row["samples"]) == len(row["data samples"]) == scaling.FEW
    if layout.endswith("pull"):
        assert row["facts"]["bytes that workers read"] >= 2 * row["nbytes"]
