"""A module under PEFT is not looked at closely at every sync, and whatever changes about it is seen all the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

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
