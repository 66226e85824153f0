"""What cases have in common: an outcome, a small vLLM, tokens held against transformers', places, what is held."""

import gc
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wsync.bench.gpu import engines, models, workers
from wsync.bench.gpu.outcome import Limit, Outcome
from wsync.session import Session

Answers = list[list[int]]
"""Tokens for each prompt."""

UNMOVED = "every data_ptr unchanged"


def outcome_of(name: str, actor: nn.Module, dtype: torch.dtype, limits: tuple[Limit, ...]) -> Outcome:
    """Of the case `name`, which syncs all weights of `actor` as `dtype`."""
    sent = [tensor.numel() for _, tensor in models.engine_side(actor)]
    return Outcome(case=name, tensors=len(sent), nbytes=sum(sent) * dtype.itemsize, limits=limits)


@contextmanager
def small_vllm(name: str, dtype: torch.dtype, **options: Any) -> Iterator[tuple[Any, nn.Module, Outcome]]:
    """A vLLM with a small model, an actor for it, and the outcome of the case `name`.

    Args:
        name: of the case.
        dtype: of the actor and the engine.
        options: of `engines.start_vllm`.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = models.config_of(models.DENSE, dtype, small=True)
        engine = engines.start_vllm(models.make_folder(config, Path(folder)), str(dtype)[len("torch.") :], **options)
        actor = models.make_actor(config, dtype, 1)
        outcome = outcome_of(name, actor, dtype, ())
        with in_place(outcome, engine):
            yield engine, actor, outcome


@contextmanager
def in_place(outcome: Outcome, engine: Any) -> Iterator[None]:
    """At the end of the block every parameter must be where it was at the beginning."""
    before = workers.places_of(engine)
    yield
    check_places(outcome, engine, before)


def check_places(outcome: Outcome, engine: Any, before: list[Mapping[str, int]]) -> None:
    """Whether the parameters are still where `workers.places_of` found them."""
    outcome.checks[UNMOVED] = workers.places_of(engine) == before


def check_tokens(
    outcome: Outcome,
    session: Session,
    actor: nn.Module,
    engine: Any,
    *,
    randomize: Callable[[Any, int], None] = models.randomize,
    request: Any = None,
) -> None:
    """Three syncs of new weights; each time the engine says what transformers says, and not what it said before.

    Args:
        randomize: gives the actor the weights of a seed.
        request: the adapter that the engine is to answer with, as `answers_of`.
    """
    said = [engines.answers_of(engine)]
    for seed in (2, 3, 4):
        randomize(actor, seed)
        session.sync()
        expected = models.greedy(actor, engines.prompts(), engines.NEW_TOKENS)
        outcome.checks[f"tokens of weights {seed}"] = says(engine, expected, said, request)


def says(engine: Any, expected: Answers, said: list[Answers], request: Any = None) -> bool:
    """Whether the engine says what is expected, and nothing that it has `said` before, to which this is added."""
    answers = engines.answers_of(engine, request)
    new = answers not in said
    said.append(answers)
    return new and answers == expected


@torch.no_grad()
def load_directly(engine: Any, model: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """By vLLM's own loader, into the `model` of an `engine` in this process."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(engine.llm_engine.vllm_config):
        model.load_weights(weights)


def held(pids: Iterable[int]) -> dict[str, object]:
    """Device memory, in bytes, and descriptors that this process holds when nothing is cached, and those of `pids`."""
    free()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "free on device": torch.cuda.mem_get_info()[0],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "descriptors of the engine's workers": [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids],
    }


def free() -> None:
    """Give back what nobody refers to."""
    gc.collect()
    torch.cuda.empty_cache()
