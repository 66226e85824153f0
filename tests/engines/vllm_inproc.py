"""Program: engines in this process. `python -m tests.engines.vllm_inproc MODELS OUT`."""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import wsync
from tests.engines import vllm_models
from tests.engines.vllm_models import prompts
from tests.engines.vllm_program import (
    SETTINGS,
    Facts,
    Tripwire,
    addresses,
    caught,
    dropped,
    fail,
    generate,
    kit,
    live_tensors,
    look,
    sampling,
    start,
    tokens,
    trainer,
    update,
    write,
)
from wsync.adapters.engines.vllm import VLLMEngine


def refused(llm: Any, folder: Path) -> Facts:
    """Trainers that lack a tensor, or have one of a wrong shape, even one that vLLM would quietly cut."""
    before = look(llm)
    lacking, odd, cut = trainer(folder), trainer(folder), trainer(folder)
    del lacking.model.layers[1].self_attn.k_proj
    odd.model.layers[0].self_attn.q_proj.weight = torch.nn.Parameter(torch.randn(65, 64))
    cut.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(torch.randn(64, 97))
    facts: Facts = {
        "missing": caught(lambda: wsync.sync(lacking, llm, config=SETTINGS)),
        "wrong shape": caught(lambda: wsync.sync(odd, llm, config=SETTINGS)),
        "too long": caught(lambda: wsync.sync(cut, llm, config=SETTINGS)),
    }
    return {**facts, "unchanged": look(llm) == before, "tokens": tokens(llm)}


def torn(llm: Any, folder: Path, healed_with: Path) -> Facts:
    """A sync that fails at its third bucket, what every entry of the engine says then, and a sync that heals it."""
    facts: Facts = {"error": caught(lambda: wsync.sync(Tripwire(trainer(folder), 2, fail), llm, config=SETTINGS))}
    facts["generate"] = caught(lambda: tokens(llm))
    facts["enqueue"] = caught(lambda: enqueue(llm))
    facts["step"] = caught(llm.llm_engine.step)
    wsync.sync(trainer(healed_with), llm, config=SETTINGS)
    return {**facts, "tokens healed": tokens(llm)}


def enqueue(llm: Any) -> None:
    """Add the long prompt and do not work on it yet."""
    llm.enqueue([{"prompt_token_ids": prompts()[3]}], sampling(), use_tqdm=False)


def requests(llm: Any, folder: Path) -> Facts:
    """Requests in flight under each pause mode, the last one frozen in its middle."""
    actor, engine = trainer(folder), llm.llm_engine
    enqueue(llm)
    facts: Facts = {"wait": caught(lambda: wsync.sync(actor, llm, config=SETTINGS))}
    facts["finished after wait was refused"] = len(llm.wait_for_completion(use_tqdm=False)[0].outputs[0].token_ids)
    enqueue(llm)
    wsync.sync(actor, llm, config=replace(SETTINGS, pause="abort"))
    facts["unfinished after abort"] = engine.get_num_unfinished_requests()
    return {**facts, **kept(llm, folder), **frozen(llm, folder)}


def kept(llm: Any, folder: Path) -> Facts:
    """A request that has some tokens when the sync comes, and goes on with the new weights."""
    enqueue(llm)
    for _ in range(6):
        llm.llm_engine.step()
    request = next(iter(llm.llm_engine.engine_core.engine_core.scheduler.requests.values()))
    done = list(request.output_token_ids)
    actor = trainer(folder)
    wsync.sync(actor, llm, config=replace(SETTINGS, pause="keep"))
    final = list(llm.wait_for_completion(use_tqdm=False)[0].outputs[0].token_ids)
    rest = vllm_models.generate(actor, prompts()[3] + done)[: len(final) - len(done)]
    return {"kept": len(done), "kept tokens": final[: len(done)] == done, "went on": final[len(done) :] == rest}


def frozen(llm: Any, folder: Path) -> Facts:
    """Requests that were frozen for syncs that failed, one before its first byte and one after it."""
    keep = replace(SETTINGS, pause="keep")
    facts: Facts = {}
    for bucket in (0, 2):
        enqueue(llm)
        actor = Tripwire(trainer(folder), bucket, fail)
        caught(partial(wsync.sync, actor, llm, config=keep))
        if bucket == 2:
            facts["of a torn engine"] = caught(lambda: llm.wait_for_completion(use_tqdm=False))
            wsync.sync(trainer(folder), llm, config=SETTINGS)
        done = llm.wait_for_completion(use_tqdm=False)
        facts[f"frozen, failed at {bucket}"] = len(done[0].outputs[0].token_ids)
    return facts


def asleep(llm: Any, folder: Path) -> Facts:
    """The user's own sleep: refused while the weights sleep, and taken when they are awake."""
    actor = trainer(folder)
    llm.sleep(level=1)
    facts: Facts = {"sync": caught(lambda: wsync.sync(actor, llm, config=SETTINGS))}
    llm.wake_up(["weights"])
    facts["weights awake"] = caught(lambda: wsync.sync(actor, llm, config=SETTINGS))
    llm.wake_up(["kv_cache"])
    return {**facts, "tokens": tokens(llm)}


def untested(llm: Any) -> Facts:
    """A version of vLLM that nobody tested, first refused and then taken at the user's own risk."""
    import vllm

    known, vllm.__version__ = vllm.__version__, "0.99.1"
    try:
        facts: Facts = {"refused": caught(lambda: VLLMEngine(llm))}
        facts["taken"] = VLLMEngine(llm, allow_untested=True).name
        return {**facts, "known from then on": VLLMEngine(llm).name}
    finally:
        vllm.__version__ = known


def served(llm: Any, actor: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """For `EngineBench.resident` where weights cannot be looked at: tokens, and those of transformers."""
    wanted = [vllm_models.generate(actor, prompt) for prompt in prompts()]
    raw = [list(answer.outputs[0].token_ids) for answer in generate(llm, prompts())]
    return {"tokens": (torch.tensor(raw), torch.tensor(wanted))}


def reload(llm: Any, folder: Path) -> Facts:
    """An update through vLLM's layerwise reload."""
    facts: Facts = {"tokens before": tokens(llm)}
    before = look(llm)
    report = wsync.sync(trainer(folder), llm, config=SETTINGS)
    facts["through loader"] = [report.through_loader, report.tensors]
    with wsync.connect(trainer(folder), llm, config=SETTINGS) as session:
        facts["explained"] = session.explain()
    facts["tokens after"] = tokens(llm)
    facts["same addresses"] = addresses(look(llm)) == addresses(before)
    return facts


def repacked(llm: Any, a: Path, b: Path) -> Facts:
    """vLLM's CPU build as it is: linear weights are packed for oneDNN."""
    facts: Facts = {"untested": untested(llm), "update": reload(llm, b), "refused": refused(llm, a)}
    facts["read"] = caught(lambda: VLLMEngine(llm).read("model.norm.weight"))
    # Of a tied weight vLLM takes either name, so that a model without the first one lacks nothing.
    facts["kit"] = kit(llm, "bias", "inproc", served, without="check_bad_input")
    return {**facts, "torn": torn(llm, a, b)}


def unpacked(llm: Any, a: Path, b: Path) -> Facts:
    """Loading in place, without a worker extension."""
    facts: Facts = {"refused": refused(llm, b), "update": update(llm, b), "torn": torn(llm, a, b)}
    facts["requests"] = requests(llm, a)
    facts["asleep"] = asleep(llm, b)
    return {**facts, "kit": kit(llm, "llama", "inproc", live_tensors)}


def main(models: Path, out: Path) -> None:
    """Run everything, each engine once."""
    facts: Facts = {}
    engines = [start(models / "bias_a")]
    facts["repacked"] = repacked(engines[0], models / "bias_a", models / "bias_b")
    facts["repacked"]["collected"] = dropped(engines)
    facts["moe"] = {"update": reload(start(models / "moe_a"), models / "moe_b")}
    write(out, facts)

    import tests.engines.vllm_plain  # noqa: F401 - from here on engines are loaded in place

    facts["unpacked"] = unpacked(start(models / "llama_a"), models / "llama_a", models / "llama_b")
    write(out, facts)
    facts["tied"] = {"update": update(start(models / "tied_a"), models / "tied_b")}
    write(out, facts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
