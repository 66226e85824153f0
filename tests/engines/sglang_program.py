"""Program: one real SGLang engine, and what becomes of it.

`python -m tests.engines.sglang_program MODELS OUT KIND PARTS TP WAY`: PARTS are functions of this module, joined by ","
and run in that order on one engine; WAY is "plugin", "loader" or "own calls". Writes {part: facts} as JSON.
"""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import wsync
from tests.engines.sglang_models import WEIGHTS, build, engine_names
from tests.engines.vllm_models import MAX_TOKENS, prompts
from wsync.adapters.engines.sglang import SGLangEngine
from wsync.adapters.engines.sglang_worker import CUSTOM_LOADER
from wsync.adapters.trainers.module import ModuleProducer
from wsync.deadline import Deadline
from wsync.plan import Bucket
from wsync.registry import engine_for, transport
from wsync.testing.engine_conformance import ENGINE_CHECKS, EngineBench

Facts = dict[str, Any]
SETTINGS = wsync.SyncConfig(bucket_bytes=64 << 10, timeout_s=60.0)
LONG = 200
"""Tokens of a request that is still in flight when a sync begins."""


class Setup:
    """The engine, started on weights "a", and where the others are."""

    def __init__(self, models: Path, kind: str, tp: int, way: str) -> None:
        import sglang

        self.models, self.kind, self.way = models, kind, way
        self.names = engine_names(self.folder("a"))
        self.engine: Any = sglang.Engine(
            model_path=str(self.folder("a")),
            skip_tokenizer_init=True,
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            mem_fraction_static=0.1,
            max_total_tokens=8192,
            context_length=512,
            skip_server_warmup=True,
            tp_size=tp,
            custom_weight_loader=[CUSTOM_LOADER] if way == "loader" else None,
        )

    def folder(self, weights: str) -> Path:
        """The checkpoint of these weights."""
        return self.models / f"{self.kind}_{weights}"

    def actor(self, weights: str) -> Any:
        """These weights as transformers has them."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder(weights), dtype=torch.float32).eval()

    def generate(self, some: Sequence[Sequence[int]], count: int = MAX_TOKENS) -> list[Any]:
        """SGLang's answers to prompts of token ids, greedy."""
        settings = {"temperature": 0, "max_new_tokens": count}
        answers: list[Any] = self.engine.generate(input_ids=list(map(list, some)), sampling_params=settings)
        return answers

    def tokens(self) -> list[list[int]]:
        """What the engine generates for each prompt."""
        return [answer["output_ids"] for answer in self.generate(prompts())]

    def start_long(self) -> Iterator[Any]:
        """A long request, and its first token."""
        settings = {"temperature": 0, "max_new_tokens": LONG}
        stream: Iterator[Any] = self.engine.generate(input_ids=prompts()[0], sampling_params=settings, stream=True)
        next(stream)
        return stream

    def live(self) -> dict[str, torch.Tensor]:
        """Every parameter of every worker."""
        control = SGLangEngine(self.engine)
        return {f"{name} of {rank}": part for name in self.names for rank, part in enumerate(control.read(name))}

    def load_fresh(self, folder: Path) -> None:
        """SGLang's own load of `folder`."""
        success, message, *_ = self.engine.update_weights_from_disk(str(folder))
        assert success, message


def update(setup: Setup) -> Facts:
    """Three syncs in a row in one session, and back to "b"."""
    facts: Facts = {"tokens": {"a": setup.tokens()}}
    facts["cached"] = setup.generate(prompts()[3:])[0]["meta_info"]["cached_tokens"]
    actor = setup.actor("a")
    with wsync.connect(actor, setup.engine, config=SETTINGS) as session:
        facts["explained"] = session.explain()
        for weights in WEIGHTS[1:]:
            actor.load_state_dict(setup.actor(weights).state_dict())
            report = session.sync()
            facts["tokens"][weights] = setup.tokens()
    facts["transport"], facts["through loader"] = report.transport, report.through_loader
    facts["version"] = engine_for(setup.engine).version()
    facts["guarded"] = "generate_request" in vars(setup.engine.tokenizer_manager)
    return facts


def bits(setup: Setup) -> Facts:
    """Every parameter of every worker after a sync, and after SGLang's own load of the same weights."""
    before = setup.live()
    wsync.sync(setup.actor("b"), setup.engine, config=SETTINGS)
    synced = setup.live()
    setup.load_fresh(setup.folder("b"))
    loaded = setup.live()
    return {
        "tensors": len(synced),
        "differ": [name for name, tensor in synced.items() if not torch.equal(tensor, loaded[name])],
        "unchanged": [name for name, tensor in synced.items() if torch.equal(tensor, before[name])],
    }


def in_flight(setup: Setup) -> Facts:
    """A request that is in its middle when a sync begins, under each pause mode."""
    facts: Facts = {}
    wsync.sync(setup.actor("a"), setup.engine, config=SETTINGS)
    alone = setup.generate(prompts()[:1], LONG)[0]["output_ids"]
    for mode in ("wait", "abort", "keep"):
        wsync.sync(setup.actor("a"), setup.engine, config=SETTINGS)
        stream = setup.start_long()
        wsync.sync(setup.actor("b"), setup.engine, config=wsync.SyncConfig(timeout_s=60.0, pause=mode))
        *_, last = stream
        answer = last["output_ids"]
        kept = next((i for i, (one, other) in enumerate(zip(answer, alone, strict=False)) if one != other), len(answer))
        rest = setup.generate([prompts()[0] + answer[:kept]], LONG - kept)[0]["output_ids"] if kept < LONG else []
        facts[mode] = {
            "reason": last["meta_info"]["finish_reason"]["type"],
            "length": len(answer),
            "kept": kept,
            "went on": answer[kept:] == rest,
        }
    return {**facts, "tokens": setup.tokens()}


def frozen(setup: Setup) -> Facts:
    """A request that was kept for a sync that failed: it waits for the next one, and can be ended by it."""
    wsync.sync(setup.actor("a"), setup.engine, config=SETTINGS)
    keep = wsync.SyncConfig(bucket_bytes=64 << 10, timeout_s=60.0, pause="keep")
    stream = setup.start_long()
    facts: Facts = {"error": caught(lambda: wsync.sync(Tripwire(setup.actor("c"), fail), setup.engine, config=keep))}
    wsync.sync(setup.actor("b"), setup.engine, config=wsync.SyncConfig(timeout_s=60.0, pause="abort"))
    *_, last = stream
    facts["reason"] = last["meta_info"]["finish_reason"]["type"]
    return {**facts, "tokens": setup.tokens()}


def impatient(setup: Setup) -> Facts:
    """A pause that gives up before the request is finished: it goes on as if nothing had been."""
    control = SGLangEngine(setup.engine)
    stream = setup.start_long()
    facts: Facts = {"error": caught(lambda: control.pause("wait", Deadline.after(0.02)))}
    *_, last = stream
    return {**facts, "length": len(last["output_ids"]), "generated": len(setup.tokens())}


def stalled(setup: Setup) -> Facts:
    """A worker that stops in the middle of an update, and goes on when the sync has been given up."""
    hasty = wsync.SyncConfig(bucket_bytes=64 << 10, timeout_s=6.0)
    victim = setup.engine.get_all_child_pids()[0]
    actor = Tripwire(setup.actor("c"), lambda: os.kill(victim, signal.SIGSTOP))
    facts: Facts = {"error": caught(lambda: wsync.sync(actor, setup.engine, config=hasty))}
    facts["generate"] = caught(setup.tokens)
    facts["next sync"] = caught(lambda: wsync.sync(setup.actor("c"), setup.engine, config=hasty))
    os.kill(victim, signal.SIGCONT)
    facts["its late answer"] = caught(lambda: SGLangEngine(setup.engine).join(Deadline.after(60.0)))
    wsync.sync(setup.actor("b"), setup.engine, config=SETTINGS)
    return {**facts, "tokens": setup.tokens()}


def killed(setup: Setup) -> Facts:
    """A worker that dies in the middle of an update. SGLang's watchdog would then end this process too."""
    setup.engine.tokenizer_manager._subprocess_watchdog.stop()
    moments: list[float] = []

    def kill() -> None:
        os.kill(setup.engine.get_all_child_pids()[0], signal.SIGKILL)
        moments.append(time.monotonic())

    actor = Tripwire(setup.actor("c"), kill)
    facts: Facts = {"error": caught(lambda: wsync.sync(actor, setup.engine, config=SETTINGS))}
    facts["seconds"] = time.monotonic() - moments[0]
    facts["generate"] = caught(setup.tokens)
    facts["next sync"] = caught(lambda: wsync.sync(setup.actor("c"), setup.engine, config=SETTINGS))
    return facts


def on_a_loop(setup: Setup) -> Facts:
    """Requests and a sync on one event loop that runs on."""
    import asyncio

    async def scenario() -> tuple[int, int]:
        settings = {"temperature": 0, "max_new_tokens": LONG}
        request = asyncio.ensure_future(
            setup.engine.async_generate(input_ids=prompts()[0], sampling_params=settings, stream=False)
        )
        while not setup.engine.tokenizer_manager.rid_to_state:
            await asyncio.sleep(0)
        await wsync.sync_async(setup.actor("d"), setup.engine, config=wsync.SyncConfig(timeout_s=60.0, pause="keep"))
        return len((await request)["output_ids"]), engine_for(setup.engine).last_version()

    length, _ = setup.engine.loop.run_until_complete(scenario())
    return {"length": length, "tokens": setup.tokens()}


def refused(setup: Setup) -> Facts:
    """What does not fit is refused before a byte is moved."""
    before = setup.tokens()
    facts: Facts = {}
    name = "model.layers.1.self_attn.k_proj"
    missing, wrong, extra = setup.actor("c"), setup.actor("c"), setup.actor("c")
    del missing.get_submodule(name).weight
    layer = wrong.get_submodule(name)
    layer.weight = torch.nn.Parameter(layer.weight.detach()[:-1].clone())
    extra.model.register_parameter("surplus", torch.nn.Parameter(torch.randn(4)))
    for case, actor in (("missing", missing), ("wrong shape", wrong), ("surplus", extra)):
        facts[case] = caught(lambda actor=actor: wsync.sync(actor, setup.engine, config=SETTINGS))  # type: ignore[misc]
    return {**facts, "same tokens": setup.tokens() == before}


def torn(setup: Setup) -> Facts:
    """A failure in the middle: nothing is served until the next sync."""
    facts: Facts = {
        "error": caught(lambda: wsync.sync(Tripwire(setup.actor("c"), fail), setup.engine, config=SETTINGS))
    }
    facts["generate"] = caught(setup.tokens)
    wsync.sync(setup.actor("b"), setup.engine, config=SETTINGS)
    return {**facts, "tokens": setup.tokens()}


def asleep(setup: Setup) -> Facts:
    """Weights that the user put to sleep without asking wsync."""
    wsync.sync(setup.actor("b"), setup.engine, config=SETTINGS)
    setup.engine.release_memory_occupation(tags=["weights"])
    facts: Facts = {"sync": caught(lambda: wsync.sync(setup.actor("b"), setup.engine, config=SETTINGS))}
    setup.engine.resume_memory_occupation(tags=["weights"])
    wsync.sync(setup.actor("c"), setup.engine, config=SETTINGS)
    return {**facts, "tokens": setup.tokens()}


def separate(setup: Setup) -> Facts:
    """Under a manager, as an engine with devices of its own: only its cache leaves for a sync."""
    actor = setup.actor("b")
    memory = wsync.MemoryManager(engine=setup.engine, models={"actor": actor}, colocated=False)
    memory.enter("sync")
    facts: Facts = {"asleep": caught(setup.tokens)}
    wsync.sync(actor, setup.engine, config=SETTINGS, memory=memory)
    memory.close()
    return {**facts, "steps": [str(move.step) for move in memory.ledger.moves()], "tokens": setup.tokens()}


def kit(setup: Setup) -> Facts:
    """Name -> "ok", or the traceback, of every check of the engine kit."""

    def resident(actor: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        live = setup.live()
        with tempfile.TemporaryDirectory() as folder:
            actor.save_pretrained(folder)
            setup.load_fresh(Path(folder))
            wanted = setup.live()  # every rank has read the folder by then; SGLang answers for the first one only
        return {name: (live[name], wanted[name]) for name in live}

    bench = EngineBench(
        engine=setup.engine,
        transport=transport("shm"),
        make_actor=lambda seed: build(setup.kind, seed),
        resident=resident,
        serve=setup.tokens,
    )
    facts: Facts = {}
    for check in ENGINE_CHECKS:
        try:
            check(bench)
            facts[check.__name__] = "ok"
        except Exception:
            facts[check.__name__] = traceback.format_exc()
    return facts


def read(setup: Setup) -> list[str]:
    """What is said when weights are to be shown."""
    return caught(setup.live)


def untested(setup: Setup) -> Facts:
    """A version that nobody has tried. Must be the first part: an engine that is known is not asked again."""
    sglang: Any = sys.modules["sglang"]
    true, sglang.__version__ = sglang.__version__, "0.9.1"
    facts: Facts = {"refused": caught(lambda: engine_for(setup.engine))}
    facts["taken"] = SGLangEngine(setup.engine, allow_untested=True).name
    sglang.__version__ = true
    return facts


class Tripwire(ModuleProducer):
    """Does `act` just before its third bucket is staged."""

    def __init__(self, model: torch.nn.Module, act: Callable[[], None]) -> None:
        super().__init__(model)
        self._model, self._act = model, act  # a producer alone would not keep the model

    def references(self, bucket: Bucket) -> None:
        """None: everything goes through `stage` and `fill`."""

    def stage(self, bucket: Bucket, slot: torch.Tensor | None = None) -> None:
        """Trip, or go on."""
        if bucket.index == 2:
            self._act()
        super().stage(bucket, slot)


def fail() -> None:
    """What a tripwire does to a sync."""
    raise RuntimeError("tripped")


def caught(call: Callable[[], object]) -> list[str]:
    """[type, message] of what `call` raises; ["nothing", ""] if it returns."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def main(models: Path, out: Path, kind: str, parts: str, tp: int, way: str) -> None:
    """Run the parts; what is known when one fails is written."""
    setup = Setup(models, kind, tp, way)
    facts: Facts = {}
    for part in parts.split(","):
        facts[part] = globals()[part](setup)
        scratch = out.with_name(f"{out.name}.{os.getpid()}")
        scratch.write_text(json.dumps(facts))
        scratch.replace(out)
        print(f"done: {part}", flush=True)
    setup.engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6])
