"""What the program of these tests drives: a real `AsyncLLM` on an event loop, and syncs into it from there."""

import asyncio
import json
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

import wsync
from tests.engines.vllm_models import MAX_TOKENS, prompts
from tests.engines.vllm_program import SETTINGS, trainer
from wsync.adapters.engines.vllm_async import AsyncVLLMEngine
from wsync.adapters.trainers.module import ModuleProducer

LONG = 240
"""Tokens of a request that is still in flight when a sync begins."""

_ids = count()


def make(folder: Path, **more: Any) -> Any:
    """A small `AsyncLLM` on the checkpoint in `folder`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            kv_cache_memory_bytes=64 << 20,
            block_size=32,
            seed=0,
            disable_log_stats=True,
            **more,
        )
    )


class Stream:
    """One request, read as it comes."""

    def __init__(self, llm: Any, prompt: Sequence[int], length: int = LONG) -> None:
        """Begin to read, on the event loop that runs."""
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.cached = 0
        self.begun = threading.Event()
        self._outputs = llm.generate({"prompt_token_ids": list(prompt)}, _greedy(length), f"request {next(_ids)}")
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> "Stream":
        async with aclosing(self._outputs) as outputs:
            async for output in outputs:
                self.tokens = list(output.outputs[0].token_ids)
                self.reason = output.outputs[0].finish_reason
                self.cached = output.num_cached_tokens or 0
                self.begun.set()
        return self

    def facts(self) -> dict[str, Any]:
        """For the judge."""
        return {"tokens": self.tokens, "reason": self.reason}


def _greedy(length: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=length, temperature=0, ignore_eos=True, detokenize=False)


async def generate(llm: Any, prompt: Sequence[int], length: int = MAX_TOKENS) -> list[int]:
    """The answer to one prompt."""
    return (await Stream(llm, prompt, length).task).tokens


async def tokens(llm: Any) -> list[list[int]]:
    """What the engine generates for each prompt."""
    return [await generate(llm, prompt) for prompt in prompts()]


async def cached_tokens(llm: Any) -> int:
    """How many tokens of the long prompt come from the prefix cache."""
    return (await Stream(llm, prompts()[3], MAX_TOKENS).task).cached


async def look(llm: Any) -> list[dict[str, list[object]]]:
    """Every worker's weights, see `inside.snapshot`."""
    return [json.loads(reply) for reply in await llm.collective_rpc("wsync_test_snapshot")]


async def load_fresh(llm: Any, folder: Path) -> None:
    """vLLM's own `load_weights` of `folder` in every worker."""
    await llm.collective_rpc("wsync_test_load", args=(str(folder),))


async def caught(call: Awaitable[object]) -> list[str]:
    """[type, message] of what `call` raises; ["nothing", ""] if it returns."""
    try:
        await call
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


class Actor(ModuleProducer):
    """A model whose weights can be exchanged; does `act` just before the engine is paused, or bucket `at` is staged."""

    def __init__(self, folder: Path) -> None:
        model = trainer(folder)
        super().__init__(model)
        self._model = model  # a producer alone would not keep the model
        self.act: Callable[[], None] | None = None
        self.at: int | None = None

    def take(self, folder: Path) -> "Actor":
        """The weights in `folder` from now on, and nothing that is done."""
        self.act, self.at = None, None
        with torch.no_grad():
            for mine, theirs in zip(self._model.parameters(), trainer(folder).parameters(), strict=True):
                mine.copy_(theirs)
        return self

    def does(self, act: Callable[[], None], at: int | None = None) -> "Actor":
        """`act`, once."""
        self.act, self.at = act, at
        return self

    def open(self) -> None:
        """Of one sync."""
        super().open()
        self._trip(None)

    def references(self, bucket: Any) -> None:
        """None: everything goes through `stage` and `fill`."""

    def stage(self, bucket: Any, slot: torch.Tensor | None) -> None:
        """Of one bucket."""
        self._trip(bucket.index)
        super().stage(bucket, slot)

    def _trip(self, at: int | None) -> None:
        if self.act is not None and self.at == at:
            act, self.act = self.act, None
            act()


class Setup:
    """An `AsyncLLM` with a trainer beside it, on the event loop that runs."""

    def __init__(self, llm: Any, models: Path) -> None:
        self.llm, self.models = llm, models
        self.loop = asyncio.get_running_loop()
        self.actor = Actor(models / "llama_a")

    def folder(self, weights: str) -> Path:
        """Where weights "a" or "b" are."""
        return self.models / f"llama_{weights}"

    async def sync(
        self, weights: str, act: Callable[[], None] | None = None, at: int | None = None, **more: Any
    ) -> Any:
        """`sync_async` of weights "a" or "b"; `act` is done on its way."""
        self.actor.take(self.folder(weights))
        if act is not None:
            self.actor.does(act, at)
        return await wsync.sync_async(self.actor, self.llm, config=replace(SETTINGS, **more))

    def begin_long(self, streams: list[Stream]) -> Callable[[], None]:
        """For `act`: put a long request into `streams`, begun."""

        async def begin() -> Stream:
            return Stream(self.llm, prompts()[0])

        def act() -> None:
            stream = self.on_loop(begin())
            assert stream.begun.wait(60), "the request gave no token"
            streams.append(stream)

        return act

    def on_loop(self, call: Any) -> Any:
        """What `call` returns, from another thread."""
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(60)

    def live(self) -> dict[str, torch.Tensor]:
        """Every parameter of every worker, from another thread."""
        engine = AsyncVLLMEngine(self.llm)
        seen = self.on_loop(look(self.llm))
        names = [name for name in seen[0] if name.endswith(("weight", "bias")) and "lm_head" not in name]
        return {f"{name} of {rank}": part for name in names for rank, part in enumerate(engine.read(name))}

    def resident(self, actor: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """For `EngineBench.resident`: every parameter, and what vLLM's own load of `actor` makes of it."""
        live = self.live()
        with tempfile.TemporaryDirectory() as folder:
            actor.save_pretrained(folder)
            self.on_loop(load_fresh(self.llm, Path(folder)))
        wanted = self.live()
        return {name: (live[name], wanted[name]) for name in live}
