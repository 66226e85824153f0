"""What the programs of these tests share: start an engine, look at it, sync into it, note what came out."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import wsync
from tests.engines.vllm_models import MAX_TOKENS, prompts
from wsync.adapters.trainers.module import ModuleProducer
from wsync.plan import Bucket

Facts = dict[str, Any]
SETTINGS = wsync.SyncConfig(bucket_bytes=64 << 10, timeout_s=60.0)


def start(folder: Path, **more: Any) -> Any:
    """A small `vllm.LLM` on the checkpoint in `folder`."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        seed=0,
        **more,
    )


def trainer(folder: Path) -> Any:
    """The model in `folder` as transformers has it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def sampling(**more: Any) -> Any:
    """Greedy, `MAX_TOKENS` long."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=MAX_TOKENS, temperature=0, detokenize=False, **more)


def tokens(llm: Any) -> list[list[int]]:
    """What the engine generates for each prompt."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts()], sampling(), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def cached_tokens(llm: Any) -> int:
    """How many tokens of the long prompt come from the prefix cache."""
    output = llm.generate([{"prompt_token_ids": prompts()[3]}], sampling(), use_tqdm=False)[0]
    return int(output.num_cached_tokens)


def look(llm: Any) -> list[dict[str, list[object]]]:
    """Every worker's weights, see `vllm_extension.snapshot`."""
    from tests.engines.vllm_extension import snapshot
    from wsync.adapters.engines.vllm import _local_worker

    local = _local_worker(llm)
    if local is not None:
        return [snapshot(local)]
    return [json.loads(reply) for reply in llm.collective_rpc("wsync_test_snapshot")]


def load_fresh(llm: Any, folder: Path) -> None:
    """vLLM's own `load_weights` of `folder` in every worker."""
    from tests.engines.vllm_extension import load
    from wsync.adapters.engines.vllm import _local_worker

    local = _local_worker(llm)
    if local is not None:
        load(local, str(folder))
    else:
        llm.collective_rpc("wsync_test_load", args=(str(folder),))


def caught(call: Callable[[], object]) -> list[str]:
    """[type, message] of what `call` raises; ["nothing", ""] if it returns."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def update(llm: Any, before: Path, after: Path) -> Facts:
    """Sync an engine that was launched on `before` to `after`, and compare with vLLM's own load of the latter."""
    facts: Facts = {"tokens before": tokens(llm), "cached tokens": cached_tokens(llm)}
    old = look(llm)
    report = wsync.sync(trainer(after), llm, config=SETTINGS)
    facts["transport"], facts["through loader"] = report.transport, report.through_loader
    facts["tokens after"] = tokens(llm)
    new = look(llm)
    load_fresh(llm, after)
    facts["as a fresh load"] = new == look(llm)
    facts["changed"] = [sum(o[n][0] != v[0] for n, v in w.items()) for o, w in zip(old, new, strict=True)]
    facts["same addresses"] = all(
        {n: v[1] for n, v in o.items()} == {n: v[1] for n, v in w.items()} for o, w in zip(old, new, strict=True)
    )
    facts["guard left"] = [name for name in ("add_request", "step") if name in vars(llm.llm_engine)]
    return facts


class Tripwire(ModuleProducer):
    """Does `act` just before bucket number `at` is staged."""

    def __init__(self, model: torch.nn.Module, at: int, act: Callable[[], None]) -> None:
        super().__init__(model)
        self._at, self._act = at, act

    def references(self, bucket: Bucket) -> None:
        """None: everything goes through `stage` and `fill`."""

    def stage(self, bucket: Bucket) -> None:
        """Trip, or go on."""
        if bucket.index == self._at:
            self._act()
        super().stage(bucket)


def fail() -> None:
    """What a tripwire does to a sync."""
    raise RuntimeError("tripped")


def write(out: Path, facts: Facts) -> None:
    """The result of a program, whole or not at all."""
    scratch = out.with_name(f"{out.name}.{os.getpid()}")
    scratch.write_text(json.dumps(facts))
    scratch.replace(out)
