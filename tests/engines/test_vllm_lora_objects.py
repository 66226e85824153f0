"""What vLLM 0.26 does otherwise about layers that take adapters, on objects like its own."""

import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from wsync.adapters.engines import vllm_lora

LAYER = "base_model.model.layers.0.q_proj"


class Around(nn.Module):
    """As `BaseLayerWithLoRA`: the layer below has the weights."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Knowing(Around):
    """That of newer vLLM, which loads the layer below by itself."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
        return AutoWeightsLoader(self.base_layer).load_weights(weights)


class Fused(nn.Linear):
    """A layer below with a loader of its own."""

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
        for _, part in weights:
            self.weight.copy_(torch.cat([part, part]))
        return set()


class AutoWeightsLoader:
    """As vLLM's: down by names, and by a child's own `load_weights` where it has one."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            child, _, rest = name.partition(".")
            if not rest:
                if name not in self._module._parameters:
                    raise ValueError(f"There is no module or parameter named {name!r}")
                self._module.get_parameter(name).copy_(tensor)
                continue
            module: Any = self._module.get_submodule(child)
            getattr(module, "load_weights", AutoWeightsLoader(module).load_weights)([(rest, tensor)])
        return set()


def parsed(name: str, mapper: Any) -> tuple[str, bool]:
    """As `parse_fine_tuned_lora_name`."""
    path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
    return mapper._map_name(path) if mapper else path, True


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three names that are asked for."""
    for path, name, value in (
        ("vllm.lora.layers", "BaseLayerWithLoRA", Around),
        ("vllm.lora.utils", "parse_fine_tuned_lora_name", parsed),
        ("vllm.model_executor.models.utils", "AutoWeightsLoader", AutoWeightsLoader),
    ):
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        setattr(sys.modules[path], name, value)


def worker(lora: object) -> Any:
    return SimpleNamespace(vllm_config=SimpleNamespace(lora_config=lora))


def model(kind: type[Around]) -> nn.Module:
    return nn.ModuleDict({"taking": kind(nn.Linear(2, 2)), "plain": nn.Linear(2, 2)})


@pytest.mark.parametrize("kind", [Around, Knowing])
def test_weights_below_a_layer_that_takes_adapters_are_found(kind: type[Around]) -> None:
    target, weight = model(kind), torch.randn(2, 2)
    with vllm_lora.loadable(worker(object()), target):
        AutoWeightsLoader(target).load_weights([("taking.weight", weight), ("plain.weight", -weight)])
    found = dict(target.named_parameters())
    assert torch.equal(found["taking.base_layer.weight"], weight)
    assert torch.equal(found["plain.weight"], -weight)


def test_a_fused_layer_below_loads_its_parts_itself() -> None:
    target, part = nn.ModuleDict({"taking": Around(Fused(2, 4))}), torch.randn(2, 2)
    with vllm_lora.loadable(worker(object()), target):
        AutoWeightsLoader(target).load_weights([("taking.weight", part)])
    assert torch.equal(target.get_parameter("taking.base_layer.weight"), torch.cat([part, part]))


def test_nothing_of_it_stays() -> None:
    target = model(Around)
    with pytest.raises(RuntimeError, match="load"), vllm_lora.loadable(worker(object()), target):
        raise RuntimeError("load")
    with pytest.raises(ValueError, match="named 'weight'"):
        AutoWeightsLoader(target).load_weights([("taking.weight", torch.randn(2, 2))])


def test_without_adapters_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm.lora.layers")
    with vllm_lora.loadable(worker(None), model(Around)):
        pass


@pytest.mark.parametrize("ask", ["get_rename_mapper", "get_unstacked_mapper"])
def test_a_part_of_a_fused_layer_keeps_its_name(ask: str) -> None:
    renaming = SimpleNamespace(_map_name=lambda name: name.replace("layers", "blocks"))
    whole = SimpleNamespace(_map_name=lambda name: name.replace("q_proj", "qkv_proj"), **{ask: lambda: renaming})
    manager = SimpleNamespace(model=SimpleNamespace(hf_to_vllm_mapper=whole))
    assert vllm_lora._named(manager, LAYER) == "blocks.0.q_proj"


def test_a_model_without_names_of_its_own() -> None:
    assert vllm_lora._named(SimpleNamespace(model=nn.Linear(1, 1)), LAYER) == "layers.0.q_proj"
