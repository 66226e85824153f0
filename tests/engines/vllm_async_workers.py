"""Program: AsyncLLM under everything that happens to it. `python -m tests.engines.vllm_async_workers MODELS OUT`."""

import asyncio
import gc
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import wsync
from tests.engines import vllm_program
from tests.engines.vllm_async_program import (
    LONG,
    Setup,
    Stream,
    cached_tokens,
    caught,
    generate,
    load_fresh,
    look,
    make,
    tokens,
)
from tests.engines.vllm_models import build, prompts
from tests.engines.vllm_program import SETTINGS, Facts, addresses, fail, trainer, write
from wsync.adapters.engines.vllm_async import AsyncVLLMEngine
from wsync.deadline import Deadline
from wsync.registry import transport
from wsync.testing.engine_conformance import ENGINE_CHECKS, EngineBench

EXTENSION = "tests.engines.vllm_plain.PlainExtension"


def outside(llm: Any, models: Path) -> Facts:
    """What is said before the AsyncLLM has an event loop, and of one that was made otherwise."""
    facts: Facts = {
        "no loop": vllm_program.caught(lambda: wsync.sync(trainer(models / "llama_a"), llm, config=SETTINGS))
    }
    parallel = llm.vllm_config.parallel_config
    for name, value in (("worker_extension_cls", ""), ("data_parallel_size", 2)):
        true = getattr(parallel, name)
        setattr(parallel, name, value)
        facts[name] = vllm_program.caught(lambda: _fresh_control(llm))
        setattr(parallel, name, true)
    return facts


def _fresh_control(llm: Any) -> object:
    from wsync.adapters.engines import vllm_control

    vllm_control._engines.pop(llm, None)
    return AsyncVLLMEngine(llm)


async def update(setup: Setup) -> Facts:
    """Three syncs; the last one compared with vLLM's own load."""
    llm = setup.llm
    facts: Facts = {"tokens": [await tokens(llm)], "cached": [], "versions": []}
    old = await look(llm)
    for weights in "bab":
        facts["cached"].append(await cached_tokens(llm))
        report = await setup.sync(weights, verify="digest")
        facts["versions"].append(report.version)
        facts["tokens"].append(await tokens(llm))
    new = await look(llm)
    await load_fresh(llm, setup.folder("b"))
    facts["as a fresh load"] = new == await look(llm)
    facts["same addresses"] = addresses(new) == addresses(old)
    facts["changed"] = [sum(o[n][0] != v[0] for n, v in w.items()) for o, w in zip(old, new, strict=True)]
    facts["transport"], facts["through loader"] = report.transport, report.through_loader
    facts["guard left"] = [name for name in AsyncVLLMEngine.guarded if name in vars(llm)]
    return facts


async def pauses(setup: Setup) -> Facts:
    """A request in flight under each pause mode, from weights "a" to "b"."""
    facts: Facts = {}
    await setup.sync("a")
    alone = await generate(setup.llm, prompts()[0], LONG)
    facts["alone"] = alone
    for mode in ("wait", "abort", "keep"):
        await setup.sync("a")
        streams: list[Stream] = []
        await setup.sync("b", setup.begin_long(streams), pause=mode)
        facts[mode] = await _ended(setup, streams[0], alone)
    return {**facts, "tokens": await tokens(setup.llm)}


async def level_0(setup: Setup) -> Facts:
    """A request in flight stands still, from weights "a" to "b"."""
    control = AsyncVLLMEngine(setup.llm)
    await setup.sync("a")
    alone = await generate(setup.llm, prompts()[0], LONG)
    stream = Stream(setup.llm, prompts()[0])
    await asyncio.to_thread(stream.begun.wait, 60)
    await asyncio.to_thread(control.sleep, 0)
    facts: Facts = {"generate": await caught(_generate(setup.llm))}
    await setup.sync("b", pause="keep")
    facts |= {"generate after a sync": await caught(_generate(setup.llm)), "stood": not stream.task.done()}
    await asyncio.to_thread(control.wake_up)
    return {**facts, **await _ended(setup, stream, alone), "tokens then": await tokens(setup.llm)}


async def _ended(setup: Setup, stream: Stream, alone: list[int]) -> Facts:
    """How a request ended, and whether it went on as the weights of now do with the tokens so far as a prompt.

    `alone` is what those of its begin say.
    """
    seen = (await stream.task).facts()
    kept = _common(seen["tokens"], alone)
    rest = await generate(setup.llm, prompts()[0] + alone[:kept], LONG - kept) if 0 < kept < LONG else []
    return {**seen, "kept": kept, "went on": seen["tokens"][kept:] == rest}


def _common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


async def failures(setup: Setup) -> Facts:
    """Syncs that fail while a request is kept: before a byte was written, and in the middle."""
    facts: Facts = {}
    await setup.sync("a")
    streams: list[Stream] = []

    async def failing(at: int, weights: str = "b") -> list[str]:
        begin = setup.begin_long(streams)

        def act() -> None:
            begin()
            setup.actor.does(fail, at)

        return await caught(setup.sync(weights, act, pause="keep"))

    facts["error before a byte"] = await failing(0)
    facts["went on with the old"] = (await streams[0].task).facts()
    facts["error"] = await failing(2)
    for name, call in (("generate", _generate), ("add_request", _add_request)):
        facts[name] = await caught(call(setup.llm))
    facts["frozen"] = not streams[1].task.done()
    await setup.sync("b", pause="wait")
    facts["healed"] = (await streams[1].task).facts()
    facts["tokens healed"] = await tokens(setup.llm)
    facts["error again"] = await failing(2, "a")
    await setup.sync("a", pause="abort")
    facts["ended"] = (await streams[2].task).facts()
    return {**facts, "tokens": await tokens(setup.llm)}


async def _generate(llm: Any) -> object:
    return await generate(llm, prompts()[0])


async def _add_request(llm: Any) -> object:
    return await llm.add_request("mine", {"prompt_token_ids": prompts()[0]}, vllm_program.sampling())


async def together(setup: Setup) -> Facts:
    """Two tasks that generate again and again while syncs run on the same loop."""
    answers: list[list[int]] = []
    refusals: list[list[str]] = []
    over = asyncio.Event()
    served = asyncio.Condition()

    async def rollouts() -> None:
        while not over.is_set():
            try:
                answers.append(await generate(setup.llm, prompts()[1]))
            except wsync.EngineStateError as error:
                refusals.append([type(error).__name__, str(error)])
            async with served:
                served.notify_all()
            await asyncio.sleep(0)

    tasks = [asyncio.ensure_future(rollouts()) for _ in range(2)]
    beats: list[int] = []
    for weights in "ab":
        async with served:
            await served.wait()
        before = len(answers) + len(refusals)
        await setup.sync(weights)
        beats.append(len(answers) + len(refusals) - before)
    seen = len(answers)
    async with served:
        await served.wait_for(lambda: len(answers) >= seen + 4)
    over.set()
    await asyncio.gather(*tasks)
    kinds = sorted({tuple(answer) for answer in answers})
    return {"answers": kinds, "last": answers[-1], "refusals": refusals[:3], "beats": beats}


async def impatient(setup: Setup, core: int) -> Facts:
    """Pauses that are given up, of a request that takes too long and of an engine core that stands still."""
    control, facts = AsyncVLLMEngine(setup.llm), Facts()
    stream = Stream(setup.llm, prompts()[0])
    await asyncio.to_thread(stream.begun.wait, 60)
    facts["wait"] = await caught(asyncio.to_thread(control.pause, "wait", Deadline.after(0.02)))
    facts["length"] = len((await stream.task).tokens)
    stream = Stream(setup.llm, prompts()[0])
    await asyncio.to_thread(stream.begun.wait, 60)
    os.kill(core, signal.SIGSTOP)
    facts["keep"] = await caught(asyncio.to_thread(control.on_pause, "keep", Deadline.after(0.5)))
    os.kill(core, signal.SIGCONT)
    facts["length after keep"] = len((await stream.task).tokens)
    return facts


async def on_the_loop(setup: Setup) -> Facts:
    """Calls that would wait for the loop on its own thread, and what the user has paused without asking wsync."""
    control = AsyncVLLMEngine(setup.llm)
    facts: Facts = {"sync": vllm_program.caught(lambda: wsync.sync(setup.actor, setup.llm, config=SETTINGS))}
    facts["wake_up"] = vllm_program.caught(lambda: control.on_wake_up(["weights"], Deadline.after(5.0)))
    await setup.llm.pause_generation(mode="keep")
    facts["paused outside"] = await caught(setup.sync("b"))
    await setup.llm.resume_generation()
    await setup.sync("b")
    return {**facts, "tokens": await tokens(setup.llm)}


async def kit(setup: Setup) -> Facts:
    """Name -> "ok", or the traceback, of every check of the engine kit, from another thread."""
    bench = EngineBench(
        engine=setup.llm,
        transport=transport("shm"),
        make_actor=lambda seed: build("llama", seed),
        resident=setup.resident,
        serve=lambda: setup.on_loop(tokens(setup.llm)),
    )

    def run() -> Facts:
        facts: Facts = {}
        for check in ENGINE_CHECKS:
            try:
                check(bench)
                facts[check.__name__] = "ok"
            except Exception:
                facts[check.__name__] = traceback.format_exc()
        return facts

    return await asyncio.to_thread(run)


async def stalled(setup: Setup, victim: int) -> Facts:
    """`victim` stops in the middle of an update, and goes on when the sync has been given up."""
    await setup.sync("a")
    facts: Facts = {"error": await caught(setup.sync("b", lambda: os.kill(victim, signal.SIGSTOP), 2, timeout_s=3.0))}
    facts["generate"] = await caught(_generate(setup.llm))
    facts["next sync"] = await caught(setup.sync("b", timeout_s=3.0))
    os.kill(victim, signal.SIGCONT)
    control = AsyncVLLMEngine(setup.llm)
    facts["its late answer"] = await caught(asyncio.to_thread(control.join, Deadline.after(60.0)))
    await setup.sync("b")
    return {**facts, "tokens healed": await tokens(setup.llm)}


async def killed(setup: Setup, victim: int) -> Facts:
    """`victim` dies in the middle of an update."""
    moments: list[float] = []

    def kill() -> None:
        os.kill(victim, signal.SIGKILL)
        moments.append(time.monotonic())

    facts: Facts = {"error": await caught(setup.sync("a", kill, 2))}
    facts["seconds"] = time.monotonic() - moments[0]
    facts["generate"] = await caught(_generate(setup.llm))
    facts["next sync"] = await caught(setup.sync("a"))
    return facts


async def ended(setups: list[Setup]) -> Facts:
    """An AsyncLLM that was shut down, and one that is gone."""
    setup = setups.pop()
    session = await asyncio.to_thread(wsync.connect, setup.actor, setup.llm, config=SETTINGS)
    setup.llm.shutdown()
    facts: Facts = {"shut down": await caught(setup.sync("a"))}
    remembered = weakref.ref(setup.llm)
    del setup
    began = time.monotonic()
    while remembered() is not None and time.monotonic() < began + 20.0:
        await asyncio.to_thread(gc.collect)  # threads of the last sync may not have let go of it yet
    facts["collected"] = remembered() is None
    facts["gone"] = await caught(asyncio.to_thread(session.sync))
    await asyncio.to_thread(session.close)
    return facts


def core_of(llm: Any) -> int:
    """Process id of the engine core."""
    return int(llm.engine_core.resources.engine_manager.processes[0].pid)


def workers_of(llm: Any) -> list[int]:
    """Process ids of the workers that the engine core started."""
    core = core_of(llm)
    children = map(int, Path(f"/proc/{core}/task/{core}/children").read_text().split())
    return [pid for pid in children if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def one(llm: Any, models: Path, say: Callable[[str, Any], None]) -> None:
    """Everything that leaves the engine alive, with one worker."""
    setups = [Setup(llm, models)]
    core, worker = core_of(llm), workers_of(llm)[-1]
    del llm
    parts: list[tuple[str, Callable[[Setup], Awaitable[Facts]]]] = [
        ("update", update),
        ("pauses", pauses),
        ("level 0", level_0),
        ("failures", failures),
        ("together", together),
        ("impatient", lambda setup: impatient(setup, core)),
        ("on the loop", on_the_loop),
        ("stalled", lambda setup: stalled(setup, worker)),
        ("kit", kit),
    ]
    for name, part in parts:
        say(name, await part(setups[0]))
    say("ended", await ended(setups))


async def two(models: Path, say: Callable[[str, Any], None]) -> None:
    """Two workers, one of which dies at the end."""
    setup = Setup(make(models / "llama_a", tensor_parallel_size=2, worker_extension_cls=EXTENSION), models)
    say("update tp 2", await update(setup))
    say("killed", await killed(setup, workers_of(setup.llm)[-1]))


def main(models: Path, out: Path) -> None:
    """Run everything; what is known when a part fails is written."""
    facts: Facts = {}

    def say(name: str, found: Any) -> None:
        facts[name] = found
        write(out, facts)
        print(f"done: {name}", flush=True)

    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    engines = [make(models / "llama_a", worker_extension_cls=EXTENSION)]
    say("outside", outside(engines[0], models))
    asyncio.run(one(engines.pop(), models, say))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    asyncio.run(two(models, say))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
