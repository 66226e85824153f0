"""A module under PEFT is not looked at closely at every sync, and whatever changes about it is seen all the same."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import wsync
from wsync.adapters.trainers.sharded import ShardedProducer
from wsync.errors import MismatchError, UnsupportedError


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    closely = ShardedProducer._look_closely

    def look(self: ShardedProducer) -> dict[str, torch.Tensor]:
        found.append(type(self).__name__)
        return closely(self)

    monkeypatch.setattr(ShardedProducer, "_look_closely", look)
    return found


def tuned() -> Any:
    torch.manual_seed(0)
    model: Any = get_peft_model(nn.Sequential(nn.Linear(6, 4, bias=False)), LoraConfig(r=2, target_modules=["0"]))
    with torch.no_grad():
        layer(model).lora_B["default"].weight.normal_()
    return model


def layer(model: Any) -> Any:
    return model.base_model.model[0]


def merged(model: Any) -> torch.Tensor:
    one = layer(model)
    weight: torch.Tensor = one.base_layer.weight.detach() + one.get_delta_weight("default").detach()
    return weight


def rescaled(model: Any) -> None:
    layer(model).scaling["default"] *= 3


def trained(model: Any) -> None:
    with torch.no_grad():
        layer(model).lora_A["default"].weight.mul_(2)


def replaced(model: Any) -> None:
    layer(model).lora_A["default"].weight = nn.Parameter(torch.randn(2, 6))


def base_replaced(model: Any) -> None:
    layer(model).base_layer.weight = nn.Parameter(torch.randn(4, 6), requires_grad=False)


@pytest.mark.parametrize("change", [trained, rescaled, replaced, base_replaced])
def test_what_changed_arrives(change: Callable[[Any], None], looks: list[str]) -> None:
    model, linear = tuned(), nn.Linear(6, 4, bias=False)
    engine = nn.Sequential(linear)
    engine.generate = lambda: None  # type: ignore[assignment]
    with wsync.connect(model, engine) as session:
        for _ in range(2):
            session.sync()
        looks.clear()
        session.sync()
        assert not looks
        change(model)
        session.sync()
        assert torch.equal(linear.weight, merged(model))
        assert bool(looks) is (change is not trained)


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "vocab_size": 8}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_key_value_heads=1, **sizes))


@pytest.mark.parametrize("how", ["add_adapter", "inject", "get_peft_model"])
def test_a_model_of_transformers_with_adapters(how: str, looks: list[str]) -> None:
    """It has methods by the names of what PEFT's own models and layers have as attributes."""
    model, settings = llama(), LoraConfig(r=2, target_modules=["q_proj"])
    actor: Any = model
    if how == "add_adapter":
        model.add_adapter(settings)
    elif how == "inject":
        inject_adapter_in_model(settings, model)
    else:
        actor = get_peft_model(model, settings)
    served = llama()
    with wsync.connect(actor, served) as session:
        for _ in range(2):
            session.sync()
        looks.clear()
        session.sync()
        assert not looks
        with torch.no_grad():
            layer = next(child for name, child in model.named_modules() if name.endswith("q_proj"))
            layer.lora_B["default"].weight.normal_()
        session.sync()
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    assert torch.equal(served.model.layers[0].self_attn.q_proj.weight, expected)


@pytest.mark.parametrize("outer", [True, False], ids=["PeftModel", "a module with layers of PEFT's"])
def test_a_session_does_not_keep_the_model(outer: bool) -> None:
    model = llama()
    actor: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])) if outer else model
    if not outer:
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), model)
    remembered, served = weakref.ref(model), llama()
    with wsync.connect(actor, served) as session:
        for _ in range(3):
            session.sync()
        del actor, model
        gc.collect()
        assert remembered() is None


def test_adapters_that_are_switched_off_are_refused_at_the_next_sync() -> None:
    model, linear = tuned(), nn.Linear(6, 4, bias=False)
    engine = nn.Sequential(linear)
    engine.generate = lambda: None  # type: ignore[assignment]
    with wsync.connect(model, engine) as session:
        for _ in range(3):
            session.sync()
        with model.disable_adapter(), pytest.raises(UnsupportedError, match="disabled"):
            session.sync()
        session.sync()
        model.add_adapter("other", LoraConfig(r=2, target_modules=["0"]))
        model.set_adapter("other")
        with pytest.raises(MismatchError, match="other active adapters than at connect"):
            session.sync()
        model.set_adapter("default")
        session.sync()
        assert torch.equal(linear.weight, merged(model))
