"""One real vLLM model in this process, its loader dry-run and replayed: `python -m ... CASE FOLDER`, facts as JSON.

oneDNN packing of linear weights is switched off before the model is built: then they lie as on a GPU.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from wsync.manifest import manifest
from wsync.plan import Bucket, Plan, TensorSpec
from wsync.record import record, writable
from wsync.replay import Replay, Routine
from wsync.topology import Endpoint, local_endpoint
from wsync.verify import check_launch_weights

Weights = Mapping[str, torch.Tensor]


class ModelLoader:
    """`wsync.protocols.Loader` over a model that vLLM built."""

    engine = "vLLM"
    whole = True

    def __init__(self, model: Any, folder: Path) -> None:
        self.model, self.folder = model, folder

    def endpoint(self) -> Endpoint:
        return local_endpoint("cpu")

    def targets(self) -> Weights:
        return {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}

    def required(self) -> Sequence[str]:
        return [name for name, _ in self.model.named_parameters(remove_duplicate=False)]

    def accepts(self, name: str) -> bool:
        return False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.model.load_weights(weights)

    def launch_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return read(self.folder).items()

    def begin(self) -> None: ...

    def finish(self) -> None: ...

    def rollback(self) -> None: ...


def build(case: str, folder: Path) -> None:
    """A tiny checkpoint of random fp32 weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": case == "tied",
    }
    torch.manual_seed(1)
    if case == "moe":
        config = Qwen3MoeConfig(**shape, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    else:
        LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)


def read(folder: Path) -> Weights:
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            weights.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return weights


def launch(folder: Path) -> Any:
    """vLLM's own model object, loaded from `folder`."""
    import vllm._custom_ops as ops
    from vllm import LLM

    ops._supports_onednn = False
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        kv_cache_memory_bytes=64 << 20,
    )
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


def arrivals(plan: Plan, weights: Weights) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
    slot = torch.empty(plan.capacity, dtype=torch.uint8)
    for bucket in plan.buckets:
        for meta, view in bucket.views(slot):
            source = weights[meta.name]
            view.copy_(source if meta.is_whole else meta.elements.view(source.reshape(-1)))
        yield bucket, [view for _, view in bucket.views(slot)]
        slot.random_(0, 256)


def snapshot(loader: ModelLoader) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in loader.targets().items()}


def differing(one: Weights, other: Weights) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


def describe(loader: ModelLoader, specs: Sequence[TensorSpec]) -> Any:
    plan = record(loader, specs)
    launch_check = check_launch_weights(loader, plan)
    targets, required = loader.targets(), loader.required()
    return manifest(plan, targets, required, engine="vLLM", endpoint=loader.endpoint(), launch=launch_check)


def facts(case: str, folder: Path) -> dict[str, Any]:
    """What the test asserts on."""
    build(case, folder)
    loader = ModelLoader(launch(folder), folder)
    weights = read(folder)
    specs = [TensorSpec(name=n, shape=tuple(t.shape), dtype=t.dtype) for n, t in weights.items()]
    launched = snapshot(loader)

    start = time.perf_counter()
    load = record(loader, specs)
    record_s = time.perf_counter() - start
    unknown = [*specs, TensorSpec(name="model.layers.7.nothing.weight", shape=(3,), dtype=torch.float32)]
    wrong = [replace(s, shape=(64, 98)) if s.name.endswith("0.mlp.down_proj.weight") else s for s in specs]
    answers = {
        "all": describe(loader, specs),
        "no k_proj": describe(loader, [s for s in specs if not s.name.endswith("1.self_attn.k_proj.weight")]),
        "unknown": describe(loader, unknown),
        "wrong shape": describe(loader, wrong),
    }
    after_dry_runs = differing(launched, snapshot(loader))

    new = {name: torch.randn_like(tensor) for name, tensor in weights.items()}
    plan = Plan.pack(specs, 20_000)
    routine = Routine.compile(load, plan)
    with writable(loader.targets()):
        Replay(routine, loader.targets()).run(arrivals(plan, new), loader.load_weights, lambda: None)
        replayed = snapshot(loader)
        loader.load_weights((name, tensor.clone()) for name, tensor in weights.items())
        loader.load_weights((name, tensor.clone()) for name, tensor in new.items())
    return {
        "inference": any(tensor.is_inference() for tensor in loader.targets().values()),
        "tensors": len(specs),
        "copies": len(load.copies),
        "fills": len(load.fills),
        "through_loader": dict(load.through_loader),
        "record_s": record_s,
        "chunked": sum(not meta.is_whole for bucket in plan.buckets for meta in bucket.tensors),
        "problems": {name: answer.problems for name, answer in answers.items()},
        "verified": answers["all"].verified,
        "unused": [
            name
            for name, parts in answers["wrong shape"].uses.items()
            if sum(part.numel for part in parts) != next(s.numel for s in wrong if s.name == name)
        ],
        "changed_by_dry_runs": after_dry_runs,
        "changed_by_replay": len(differing(launched, replayed)),
        "replay_differs_from_loader": differing(replayed, snapshot(loader)),
    }


if __name__ == "__main__":
    results = {case: facts(case, Path(sys.argv[1], case)) for case in sys.argv[2:]}
    print("FACTS " + json.dumps(results), flush=True)
    os._exit(0)  # vLLM's threads may keep the interpreter from ending
