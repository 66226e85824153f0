"""Program: adapters alone into two worker processes. `python -m tests.engines.vllm_lora_workers MODELS OUT`."""

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import wsync
from tests.engines.vllm_models import generate, prompts
from tests.engines.vllm_program import SETTINGS, Facts, Tripwire, caught, fail, sampling, start, tokens, trainer, write
from wsync.adapters.engines.vllm_lora import ADAPTER_ID, lora_request
from wsync.testing.chaos import ChaosTransport, Fault
from wsync.transports.shm import ShmTransport

EXTENSION = "tests.engines.vllm_extension.AdapterExtension"
ALONE = replace(SETTINGS, lora="adapter", verify="digest", bucket_bytes=4096)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tuned(folder: Path, seed: int, **options: Any) -> Any:
    """The model in `folder` under a random adapter, whose scaling depends on the seed, too."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 4 + seed, "init_lora_weights": False, "target_modules": list(LINEAR), **options}
    return get_peft_model(trainer(folder), LoraConfig(task_type="CAUSAL_LM", **settings)).eval()


def expected(actor: Any) -> list[list[int]]:
    """Greedy tokens of transformers and PEFT."""
    with torch.no_grad():
        return [generate(actor, prompt) for prompt in prompts()]


def adapted(llm: Any, request: Any) -> list[list[int]]:
    """What the engine generates with an adapter."""
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    return [
        list(done.outputs[0].token_ids)
        for done in llm.generate(asked, sampling(), use_tqdm=False, lora_request=request)
    ]


def rounds(llm: Any, base: Path) -> Facts:
    """Three adapters in turn, the middle one on two of the layers only and of another rank."""
    facts: Facts = {"base before": tokens(llm)}
    few = {"target_modules": ["q_proj", "down_proj"], "r": 8, "rank_pattern": {"q_proj": 2}, "use_rslora": True}
    for seed in (1, 2, 3):
        actor = tuned(base, seed, **(few if seed == 2 else {}))
        wsync.sync(actor, llm, config=ALONE)
        facts[f"adapter {seed}"] = [adapted(llm, lora_request()), expected(actor)]
    return {**facts, "base after": tokens(llm)}


def as_loaded(llm: Any, base: Path, folder: Path) -> list[bool]:
    """Whether each worker's layers hold what vLLM's own load of the adapter's files puts there."""
    from vllm.lora.request import LoRARequest

    actor = tuned(base, 4)
    actor.save_pretrained(folder)
    wsync.sync(actor, llm, config=ALONE)
    adapted(llm, lora_request())
    adapted(llm, LoRARequest("own", 1, str(folder)))
    asked = [llm.collective_rpc("wsync_test_adapter", args=(number,)) for number in (ADAPTER_ID, 1)]
    return [len(ours) > 0 and ours == theirs for ours, theirs in zip(*asked, strict=True)]


def refused(llm: Any, base: Path) -> Facts:
    """Adapters that do not fit."""
    kinds: dict[str, dict[str, Any]] = {
        "rank": {"r": 16},
        "dora": {"use_dora": True},
        "embedding": {"target_modules": ["embed_tokens"]},
        "head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    }
    before = adapted(llm, lora_request())
    facts: Facts = {}
    for kind, options in kinds.items():
        facts[kind] = caught(partial(wsync.sync, tuned(base, 9, **options), llm, config=ALONE))
    wide = tuned(base, 9, target_modules=["q_proj"])
    wide.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight = torch.nn.Parameter(
        torch.randn(4, 65)
    )
    facts["shape"] = caught(lambda: wsync.sync(wide, llm, config=ALONE))
    return {**facts, "unchanged": adapted(llm, lora_request()) == before}


def torn(llm: Any, base: Path, other: Path) -> Facts:
    """An adapter that breaks off, then base weights that do, and what each is healed with."""
    actor = tuned(base, 5)
    breaking = replace(ALONE, transport=ChaosTransport(ShmTransport(), Fault(kind="raise", bucket=2)), num_slots=1)
    facts: Facts = {"adapter": caught(lambda: wsync.sync(actor, llm, config=breaking))}
    facts["generate"] = caught(lambda: adapted(llm, lora_request()))
    wsync.sync(actor, llm, config=ALONE)
    facts["healed"] = [adapted(llm, lora_request()), expected(actor)]

    facts["weights"] = caught(lambda: wsync.sync(Tripwire(trainer(other), 2, fail), llm, config=SETTINGS))
    facts["adapter on broken weights"] = caught(lambda: wsync.sync(actor, llm, config=ALONE))
    facts["generate then"] = caught(lambda: tokens(llm))
    wsync.sync(trainer(other), llm, config=SETTINGS)
    facts["base"] = tokens(llm)
    facts["adapters"] = sorted(llm.llm_engine.list_loras())
    actor = tuned(other, 6)
    wsync.sync(actor, llm, config=ALONE)
    facts["on the new base"] = [adapted(llm, lora_request()), expected(actor)]
    wsync.sync(actor, llm, config=SETTINGS)
    facts["merged"] = [tokens(llm), expected(actor)]
    return facts


def main(models: Path, out: Path) -> None:
    """Run all of it on one engine."""
    base, other = models / "llama_a", models / "llama_b"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    llm = start(
        base,
        tensor_parallel_size=2,
        worker_extension_cls=EXTENSION,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
    )
    facts: Facts = {"rounds": rounds(llm, base), "as loaded": as_loaded(llm, base, out.with_name("adapter"))}
    facts |= {"refused": refused(llm, base), "torn": torn(llm, base, other)}
    write(out, facts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
