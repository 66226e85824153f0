"""Engine-side names: those that `save_pretrained` writes, whatever the module is wrapped in, with the same bytes."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from wsync.adapters.trainers.names import Source, held_tensors, sources
from wsync.errors import UnsupportedError

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def tied() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True))


def moe() -> PreTrainedModel:
    experts = {"moe_intermediate_size": 16, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **experts))


def exported(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every source as its region says, taken from the module's own memory."""
    held = held_tensors(module)
    found: list[Source] = sources(module, held)
    assert len({source.name for source in found}) == len(found)
    return {
        source.name: source.region.view(held[source.parent].tensor.detach().reshape(-1)).reshape(source.shape)
        for source in found
        if not source.optional
    }


@pytest.mark.parametrize("build", [llama, tied, moe])
def test_names_and_bytes_are_those_of_the_saved_checkpoint(
    build: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    model = build()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    result = exported(model)
    assert sorted(result) == sorted(saved)
    assert [name for name in saved if not torch.equal(result[name], saved[name])] == []


def test_experts_are_named_one_by_one() -> None:
    result = exported(moe())
    assert result["model.layers.1.mlp.experts.3.up_proj.weight"].shape == (16, 32)
    assert not any("gate_up_proj" in name for name in result)


def test_tied_heads_come_once_under_the_name_that_is_not_derived() -> None:
    model = tied()
    assert "lm_head.weight" in held_tensors(model)
    assert "lm_head.weight" not in exported(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert "lm_head.weight" in exported(model)


def test_ties_by_storage_are_found_without_a_declaration() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight.data = module[0].weight.data
    assert list(exported(module)) == ["0.weight", "2.weight"]


@pytest.mark.parametrize(
    "wrap", [lambda m: torch.compile(m, backend="eager"), checkpoint_wrapper, nn.DataParallel, lambda m: m]
)
def test_wrappers_leave_no_trace_in_names(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = llama()
    expected = list(exported(model))
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp, backend="eager")
    assert list(exported(wrap(model))) == expected


def test_a_submodule_that_is_merely_called_module_keeps_its_name() -> None:
    outer = nn.Module()
    outer.module = nn.Linear(2, 2, bias=False)
    assert list(exported(outer)) == ["module.weight"]


def test_non_persistent_buffers_are_optional() -> None:
    model = llama()
    optional = {source.name for source in sources(model, held_tensors(model)) if source.optional}
    assert "model.rotary_emb.inv_freq" in optional


def test_a_conversion_by_slices_and_transposes_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    convert_with(
        monkeypatch, lambda name, tensor: {f"{name}.t": tensor.t().contiguous()[1:] if tensor.ndim == 2 else tensor}
    )
    model = llama()
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    assert torch.equal(exported(model)["model.layers.0.mlp.up_proj.weight.t"], weight.t()[1:])


@pytest.mark.parametrize("derive", [lambda t: t * 2, lambda t: t.to(torch.float16), lambda t: torch.cat([t, t])])
def test_a_computed_tensor_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, derive: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    convert_with(monkeypatch, lambda name, tensor: {name: derive(tensor) if "norm" in name else tensor})
    model = llama()
    with pytest.raises(
        UnsupportedError, match=r"5 checkpoint tensors .* computed .*: model\.layers\.0\.input_layernorm"
    ):
        exported(model)


def convert_with(monkeypatch: pytest.MonkeyPatch, one: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> None:
    """Put another conversion in the place of transformers' own."""
    import transformers.core_model_loading as loading

    def convert(model: object, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {key: value for name, tensor in state.items() for key, value in one(name, tensor).items()}

    monkeypatch.setattr(loading, "revert_weight_conversion", convert)


def test_a_transformers_that_is_too_old_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(nn.Linear):
        """A model of a transformers without conversions."""

    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", SimpleNamespace(PreTrainedModel=Old))
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    model = Old(2, 3)
    with pytest.raises(UnsupportedError, match=r"names of Old cannot import.*; pip install 'wsync-rl\[hf\]'"):
        sources(model, held_tensors(model))
