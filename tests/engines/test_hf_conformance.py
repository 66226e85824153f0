"""The shipped engine checks on the embedded engine: a model of this process, and one in a worker process."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engines.hf_models import FAMILIES, PROMPTS, seeded
from wsync.adapters.engines.hf import HFEngine
from wsync.protocols import Transport
from wsync.testing.engine_conformance import ENGINE_CHECKS, EngineBench
from wsync.transports.inproc import InprocTransport
from wsync.transports.shm import ShmTransport


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models on a busy machine; the worker inherits it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(threads)


def bench_of(engine: HFEngine, passed: object, make: Callable[[], Any], transport: Transport) -> EngineBench:
    def resident(actor: nn.Module) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        wanted = {**dict(actor.named_parameters()), **dict(actor.named_buffers())}
        return {name: (engine.read(name)[0], tensor) for name, tensor in wanted.items()}

    return EngineBench(
        engine=passed,
        transport=transport,
        make_actor=lambda seed: seeded(make, seed),
        resident=resident,
        serve=lambda: engine.generate(PROMPTS, max_new_tokens=8),
    )


@pytest.fixture(scope="module", params=list(FAMILIES))
def local(request: pytest.FixtureRequest) -> EngineBench:
    make = FAMILIES[request.param]
    model = seeded(make, 0)
    return bench_of(HFEngine(model), model, make, InprocTransport())


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineBench]:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    make = FAMILIES["qwen3 moe"]
    seeded(make, 0).save_pretrained(folder)
    with HFEngine.launch(folder) as engine:
        yield bench_of(engine, engine, make, ShmTransport())


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_a_model_of_this_process(local: EngineBench, check: Callable[[EngineBench], None]) -> None:
    check(local)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_a_model_in_a_worker_process(launched: EngineBench, check: Callable[[EngineBench], None]) -> None:
    check(launched)
