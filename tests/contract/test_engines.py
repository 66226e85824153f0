"""Every engine that starts in a second passes the engine kit. (vLLM does in tests/engines.)"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from wsync.adapters.engines.hf import HFEngine
from wsync.registry import transport
from wsync.testing.engine_conformance import ENGINE_CHECKS, EngineBench

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def bench_of(engine: HFEngine, handle: object, transport_name: str) -> EngineBench:
    def resident(actor: nn.Module) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        return {name: (engine.read(name)[0], wanted) for name, wanted in actor.state_dict().items()}

    return EngineBench(
        engine=handle,
        transport=transport(transport_name),
        make_actor=llama,
        resident=resident,
        serve=lambda: engine.generate(PROMPTS, max_new_tokens=8),
    )


@pytest.fixture(scope="module")
def in_process() -> EngineBench:
    model = llama(0)
    bench = bench_of(HFEngine(model), model, "inproc")
    _keep_alive.append(model)
    return bench


_keep_alive: list[nn.Module] = []


@pytest.fixture(scope="module")
def in_a_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineBench]:
    folder: Path = tmp_path_factory.mktemp("llama")
    llama(0).save_pretrained(folder)
    engine = HFEngine.launch(folder)
    yield bench_of(engine, engine, "shm")
    engine.shutdown()


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("place", ["in_process", "in_a_process"])
def test_engine_kit(place: str, check: Callable[[EngineBench], None], request: pytest.FixtureRequest) -> None:
    check(request.getfixturevalue(place))
