"""The loader of the embedded engine against checkpoints that transformers itself wrote."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.engines.hf_models import FAMILIES, llama, qwen3_moe, same_bits, seeded, tied_qwen2
from wsync.adapters.engines.hf_loader import HFLoader, checkpoint_files
from wsync.errors import EngineStateError, MismatchError, UnsupportedError
from wsync.topology import local_endpoint


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in checkpoint_files(folder) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_loads_the_checkpoint_that_transformers_saved(family: str, tmp_path: Path) -> None:
    source, target = (seeded(FAMILIES[family], seed) for seed in (1, 2))
    weights = checkpoint(saved(source, tmp_path))
    pointers = {name: parameter.data_ptr() for name, parameter in target.named_parameters()}
    assert not same_bits(source, target)
    HFLoader(target).load_weights(weights.items())
    assert same_bits(source, target)
    assert pointers == {name: parameter.data_ptr() for name, parameter in target.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_and_persistent_buffer_is_required_once(family: str) -> None:
    model = seeded(FAMILIES[family], 1)
    model.register_buffer("scale", torch.randn(3))
    model.register_buffer("scratch", torch.randn(3), persistent=False)
    loader = HFLoader(model)
    expected = {name for name, _ in model.named_parameters()} | {"scale"}
    assert len(loader.required()) == len(set(loader.required()))
    assert set(loader.required()) == expected
    assert expected <= loader.targets().keys()
    assert [loader.accepts(name) for name in ("scratch", "scale", "model.rotary_emb.inv_freq", "other")] == [
        True,
        False,
        True,
        False,
    ]


def test_buffers_are_loaded_like_parameters() -> None:
    model = seeded(llama, 1)
    model.register_buffer("scratch", torch.randn(3), persistent=False)
    fresh = torch.randn(3)
    HFLoader(model).load_weights([("scratch", fresh)])
    assert torch.equal(model.scratch, fresh)


def test_a_cast_is_the_same_as_transformers_makes(tmp_path: Path) -> None:
    source, target = seeded(llama, 1), seeded(llama, 2).to(torch.bfloat16)
    HFLoader(target).load_weights(checkpoint(saved(source, tmp_path)).items())
    assert same_bits(target, source.to(torch.bfloat16))


def test_a_single_expert_reaches_its_part_of_the_stack() -> None:
    model = seeded(qwen3_moe, 1)
    before = model.model.layers[1].mlp.experts.gate_up_proj.detach().clone()
    fresh = torch.randn(32, 64)
    HFLoader(model).load_weights([("model.layers.1.mlp.experts.2.up_proj.weight", fresh)])
    after = model.model.layers[1].mlp.experts.gate_up_proj.detach()
    changed = (before != after).nonzero()
    assert torch.equal(after[2, 32:], fresh)
    assert set(changed[:, 0].tolist()) == {2}
    assert changed[:, 1].min() == 32


@pytest.mark.parametrize(
    ("make", "name", "shape", "words"),
    [
        (llama, "model.layers.7.mlp.up_proj.weight", (96, 64), "no such tensor"),
        (llama, "model.norm.weight", (63,), r"its shape is \[63\], the model wants \[64\]"),
        (llama, "model.norm.weight", (1,), r"its shape is \[1\]"),
        (tied_qwen2, "lm_head.weight", (128, 64), "of its own: it is tied to model.embed_tokens.weight"),
        (qwen3_moe, "model.layers.0.mlp.experts.gate_up_proj", (4, 64, 64), "no such tensor in its checkpoint"),
        (qwen3_moe, "model.layers.0.mlp.experts.4.up_proj.weight", (32, 64), "no such tensor"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(make: Any, name: str, shape: Any, words: str) -> None:
    model, untouched = seeded(make, 1), seeded(make, 1)
    with pytest.raises(MismatchError, match=f"{name}: .*{words}"):
        HFLoader(model).load_weights([(name, torch.randn(shape))])
    assert same_bits(model, untouched)


def test_a_stack_that_is_not_contiguous_is_refused() -> None:
    model = seeded(qwen3_moe, 1)
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach().transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(UnsupportedError, match="not contiguous"):
        HFLoader(model).load_weights([("model.layers.0.mlp.experts.0.up_proj.weight", torch.randn(32, 64))])


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "40KB"}], ids=["one file", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_launch_weights_are_the_checkpoint(family: str, options: dict[str, str], tmp_path: Path) -> None:
    folder = saved(seeded(FAMILIES[family], 1), tmp_path, **options)
    assert (len(checkpoint_files(folder)) > 1) == bool(options)
    model = seeded(FAMILIES[family], 2)
    loader = HFLoader(model, folder)
    launched = loader.launch_weights()
    assert launched is not None
    streamed = dict(launched)
    expected = checkpoint(folder)
    assert streamed.keys() == expected.keys()
    assert all(torch.equal(streamed[name], expected[name]) for name in expected)
    loader.load_weights(streamed.items())
    assert same_bits(model, seeded(FAMILIES[family], 1))


def test_launch_weights_leave_out_what_the_model_does_not_take(tmp_path: Path) -> None:
    model = seeded(tied_qwen2, 1)
    weights = checkpoint(saved(model, tmp_path))
    save_file({**weights, "lm_head.weight": torch.randn(128, 64)}, tmp_path / "model.safetensors")
    launched = HFLoader(model, tmp_path).launch_weights()
    assert launched is not None
    assert dict(launched).keys() == weights.keys()


def test_without_a_checkpoint_there_are_no_launch_weights() -> None:
    assert HFLoader(seeded(llama, 1)).launch_weights() is None


def test_the_model_is_not_kept_alive() -> None:
    loader = HFLoader(seeded(llama, 1))
    with pytest.raises(EngineStateError, match="no longer exists"):
        loader.targets()


def test_endpoint_is_where_the_weights_are() -> None:
    model = seeded(llama, 1)
    assert HFLoader(model).endpoint() == local_endpoint("cpu")
    assert HFLoader(model).engine == f"transformers {transformers.__version__}"
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedError, match=r"spread over \['cpu', 'meta'\]"):
        HFLoader(model).endpoint()


def test_any_module_goes_by_its_own_names() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    loader = HFLoader(model)
    assert set(loader.required()) == set(model.state_dict())
    weights = {name: torch.randn(t.shape) if t.is_floating_point() else t + 5 for name, t in model.state_dict().items()}
    loader.load_weights(weights.items())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
