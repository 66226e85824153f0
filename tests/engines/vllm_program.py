"""What the programs of these tests share: start an engine, look at it, sync into it, note what came out."""

import gc
import json
import os
import tempfile
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import wsync
from tests.engines.inside import Seen
from tests.engines.vllm_models import MAX_TOKENS, build, prompts
from wsync.adapters.engines.vllm import VLLMEngine
from wsync.adapters.trainers.module import ModuleProducer
from wsync.plan import Bucket
from wsync.registry import transport
from wsync.testing.engine_conformance import ENGINE_CHECKS, EngineBench

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


def sampling() -> Any:
    """Greedy, `MAX_TOKENS` long."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=MAX_TOKENS, temperature=0, detokenize=False)


def generate(llm: Any, some: Sequence[Sequence[int]]) -> list[Any]:
    """vLLM's answers to prompts of token ids."""
    answers: list[Any] = llm.generate([{"prompt_token_ids": p} for p in some], sampling(), use_tqdm=False)
    return answers


def tokens(llm: Any) -> list[list[int]]:
    """What the engine generates for each prompt."""
    return [list(answer.outputs[0].token_ids) for answer in generate(llm, prompts())]


def cached_tokens(llm: Any) -> int:
    """How many tokens of the long prompt come from the prefix cache."""
    return int(generate(llm, prompts()[3:])[0].num_cached_tokens)


def look(llm: Any, *, buffers: bool = True) -> list[Seen]:
    """Every worker's weights, see `inside.snapshot`."""
    from tests.engines.vllm_extension import snapshot
    from wsync.adapters.engines.vllm import local_worker

    local = local_worker(llm)
    if local is not None:
        return [snapshot(local, buffers=buffers)]
    return [json.loads(reply) for reply in llm.collective_rpc("wsync_test_snapshot", args=(buffers,))]


def addresses(seen: list[Seen]) -> list[dict[str, object]]:
    """Name -> address, by worker."""
    return [{name: address for name, (_, address) in worker.items()} for worker in seen]


def load_fresh(llm: Any, folder: Path) -> None:
    """vLLM's own `load_weights` of `folder` in every worker."""
    from tests.engines.vllm_extension import load
    from wsync.adapters.engines.vllm import local_worker

    local = local_worker(llm)
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


def update(llm: Any, after: Path, make_actor: Callable[[Path], Any] = trainer) -> Facts:
    """Sync an engine to the weights in `after`, and compare with vLLM's own load of them."""
    facts: Facts = {"tokens before": tokens(llm), "cached tokens": cached_tokens(llm)}
    old = look(llm)
    report = wsync.sync(make_actor(after), llm, config=SETTINGS)
    facts["transport"], facts["through loader"] = report.transport, report.through_loader
    facts["tokens after"] = tokens(llm)
    new = look(llm)
    load_fresh(llm, after)
    facts["as a fresh load"] = new == look(llm)
    facts["changed"] = [sum(o[n][0] != v[0] for n, v in w.items()) for o, w in zip(old, new, strict=True)]
    facts["same addresses"] = addresses(new) == addresses(old)
    facts["guard left"] = [name for name in ("add_request", "step") if name in vars(llm.llm_engine)]
    return facts


def kit(
    llm: Any, kind: str, transport_name: str, resident: Callable[[Any, Any], Mapping[str, Any]], without: str = ""
) -> Facts:
    """Name -> "ok", or the traceback, of every check of the engine kit. `resident(llm, actor)`: see `EngineBench`."""
    bench = EngineBench(
        engine=VLLMEngine(llm),
        transport=transport(transport_name),
        make_actor=lambda seed: build(kind, seed),
        resident=lambda actor: resident(llm, actor),
        serve=lambda: tokens(llm),
    )
    facts: Facts = {}
    for check in (check for check in ENGINE_CHECKS if check.__name__ != without):
        try:
            check(bench)
            facts[check.__name__] = "ok"
        except Exception:
            facts[check.__name__] = traceback.format_exc()
    return facts


def live_tensors(llm: Any, actor: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For `EngineBench.resident`: every parameter of every worker, and what vLLM's own load of `actor` makes of it."""
    names = [
        name for name, (_, _) in look(llm)[0].items() if name.endswith(("weight", "bias")) and "lm_head" not in name
    ]
    live = _read(llm, names)
    with tempfile.TemporaryDirectory() as folder:
        actor.save_pretrained(folder)
        load_fresh(llm, Path(folder))
    wanted = _read(llm, names)
    return {name: (live[name], wanted[name]) for name in live}


def _read(llm: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
    engine = VLLMEngine(llm)
    return {f"{name} of {rank}": tensor for name in names for rank, tensor in enumerate(engine.read(name))}


class Tripwire(ModuleProducer):
    """Does `act` just before bucket number `at` is staged."""

    def __init__(self, model: torch.nn.Module, at: int, act: Callable[[], None]) -> None:
        super().__init__(model)
        self._model, self._at, self._act = model, at, act  # a producer alone would not keep the model

    def references(self, bucket: Bucket) -> None:
        """None: everything goes through `stage` and `fill`."""

    def stage(self, bucket: Bucket, slot: torch.Tensor | None) -> None:
        """Trip, or go on."""
        if bucket.index == self._at:
            self._act()
        super().stage(bucket, slot)


def fail() -> None:
    """What a tripwire does to a sync."""
    raise RuntimeError("tripped")


def dropped(engines: list[Any]) -> bool:
    """Empties the list; whether the engine that was in it is gone, with nobody left to hold it."""
    remembered = weakref.ref(engines[0])
    engines.clear()
    gc.collect()
    return remembered() is None


def write(out: Path, facts: Facts) -> None:
    """The result of a program, whole or not at all."""
    scratch = out.with_name(f"{out.name}.{os.getpid()}")
    scratch.write_text(json.dumps(facts))
    scratch.replace(out)
