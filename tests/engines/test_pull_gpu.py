"""Workers on a GPU that pull from another process: what is mapped, when it is mapped anew, and what cannot be."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wsync
from tests.engines.hf_models import FAMILIES, same_bits, seeded
from wsync.adapters.engines.hf import HFEngine
from wsync.errors import UnsupportedError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PULL = wsync.SyncConfig(path="pull", timeout_s=60.0)
llama = FAMILIES["llama"]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(params=["cuda:0", pytest.param("cuda:1", marks=TWO)])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HFEngine]:
    seeded(llama, 0).save_pretrained(tmp_path)
    with HFEngine.launch(tmp_path, device=request.param, timeout_s=120.0) as launched:
        yield launched


def on_device(seed: int) -> Any:
    return seeded(llama, seed).to("cuda:0")


def has(engine: HFEngine, actor: Any) -> bool:
    """Whether the engine has the actor's weights, bit by bit."""
    live = {name: engine.read(name)[0] for name, _ in actor.named_parameters()}
    return all(torch.equal(live[name], tensor.detach().cpu()) for name, tensor in actor.named_parameters())


def test_every_tensor_arrives_and_nothing_is_mapped_twice(engine: HFEngine) -> None:
    actor = on_device(1)
    with wsync.connect(actor, engine, config=PULL) as session:
        first = session.sync()
        assert has(engine, actor)
        assert first.stages["worker map"] > 0
        for seed in (2, 3):
            with torch.no_grad():
                for parameter, new in zip(actor.parameters(), on_device(seed).parameters(), strict=True):
                    parameter.copy_(new)
            report = session.sync()
            assert has(engine, actor)
            assert report.stages["worker map"] == 0
            assert 0 < report.stages["worker read"] < report.seconds
            assert report.pulled_nbytes == report.nbytes


def test_memory_that_was_replaced_is_mapped_anew(engine: HFEngine) -> None:
    actor = on_device(1)
    with wsync.connect(actor, engine, config=PULL) as session:
        session.sync()
        spare = on_device(2)
        torch.cuda.empty_cache()
        for parameter, new in zip(actor.parameters(), spare.parameters(), strict=True):
            parameter.data = new.data
        del spare
        report = session.sync()
        assert has(engine, actor)
        assert report.stages["worker map"] > 0


def test_memory_comes_back_when_workers_let_go(engine: HFEngine) -> None:
    actor = on_device(1)
    large = torch.nn.Parameter(torch.randn(1 << 26, device="cuda:0"))
    with wsync.connect(actor, engine, config=PULL) as session:
        for _ in range(3):
            embedding = actor.get_input_embeddings().weight
            embedding.data = large.data[: embedding.numel()].view(embedding.shape).copy_(embedding)
            session.sync()
            assert has(engine, actor)
            session.release_slots()
            embedding.data = embedding.data.clone()
            free = torch.cuda.mem_get_info(0)[0]
            nbytes, large.data = large.nbytes, torch.empty(0, device="cuda:0")
            torch.cuda.empty_cache()
            assert torch.cuda.mem_get_info(0)[0] - free >= nbytes
            large.data = torch.randn(1 << 26, device="cuda:0")


def test_buckets_go_to_another_device_too(engine: HFEngine) -> None:
    actor = on_device(1)
    config = wsync.SyncConfig(path="buckets", transport="cuda_ipc", bucket_bytes=4096, timeout_s=60.0)
    with wsync.connect(actor, engine, config=config) as session:
        for seed in (2, 3):
            with torch.no_grad():
                for parameter, new in zip(actor.parameters(), on_device(seed).parameters(), strict=True):
                    parameter.copy_(new)
            assert session.sync().pulled_nbytes == 0
            assert has(engine, actor)


def test_an_engine_in_this_process_reads_the_memory_as_it_is() -> None:
    actor, model = on_device(1), on_device(0)
    with wsync.connect(actor, model, config=PULL) as session:
        assert session.sync().pulled_nbytes > 0
        assert same_bits(actor, model)


def test_host_memory_is_not_pulled_into_a_device(engine: HFEngine) -> None:
    with pytest.raises(UnsupportedError, match="no transport serves"):
        wsync.connect(seeded(llama, 1), engine, config=PULL)
