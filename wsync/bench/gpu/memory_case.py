"""A trainer and an engine in turn on one GPU, under the memory manager: what each phase takes, and what was predicted.

An iteration is rollout, train, sync. Everything is real: a model of 7B shape, its gradients and AdamW's states, the
engine's weights and a KV cache so large that all of it together would not fit.
"""

import gc
import math
import statistics
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import wsync
from wsync.bench.gpu import engines, models, workers
from wsync.bench.gpu.checks import Answers, check_places, load_directly, outcome_of, says
from wsync.bench.gpu.outcome import Outcome
from wsync.bench.gpu.pinned import PinnedCopies
from wsync.bench.gpu.stays import Stay, growth, stays_of
from wsync.config import MIB
from wsync.memory.cuda_device import CudaDevice
from wsync.planner import Setting, predict
from wsync.planner.hf_config import model_of

ITERATIONS = 5
FLAT_BYTES = 32 * MIB
"""By how much a stay in a phase may exceed the second one."""

_DTYPE = torch.bfloat16
_KV_SHARE = 0.64
"""Of the device, for the KV cache: the engine and an actor of 7B start beside each other, and nothing more fits."""

_SEQUENCE, _MICRO_BATCHES = 512, 2
"""A second micro-batch, because the most is there when a backward pass begins beside the gradients of another."""

_NEAR = 0.05
"""Share by which a peak may differ from its prediction."""

_FAST = 0.8
"""Least share of the speed of single pinned copies, for the actor's way to the host and back."""


class Trainer:
    """An actor with real AdamW, and what one step of it looks like."""

    def __init__(self, config: Any, device: str) -> None:
        """A model with random weights on `device`."""
        self.actor: Any = models.make_actor(config, _DTYPE, 1, device)
        # Fused: the others make temporaries as large as the model.
        self.optimizer = torch.optim.AdamW(self.actor.parameters(), lr=1e-3, fused=True)
        self.gradient_bytes = 0
        self.losses: list[float] = []

    def step(self) -> None:
        """Forward and backward of each micro-batch, then one step of the optimizer. No gradients are left."""
        generator = torch.Generator().manual_seed(len(self.losses))
        vocabulary = self.actor.config.vocab_size
        total = 0.0
        for _ in range(_MICRO_BATCHES):
            ids = torch.randint(5, vocabulary, (1, _SEQUENCE), generator=generator).to(self.actor.device)
            loss = self.actor(input_ids=ids, labels=ids, use_cache=False).loss / _MICRO_BATCHES
            loss.backward()
            total += float(loss.detach())
        self.losses.append(total)
        self.gradient_bytes = sum(one.grad.nbytes for one in self.actor.parameters() if one.grad is not None)
        self.optimizer.step()
        self.optimizer.zero_grad()


def vllm_memory(name: str, *, small: bool = False, device: str = "cuda") -> Outcome:
    """Five iterations with a vLLM of this process that sleeps at level 2."""
    total = CudaDevice().usage().total
    cache_bytes = int(_KV_SHARE * total)
    with tempfile.TemporaryDirectory() as folder:
        config = models.config_of(models.DENSE, _DTYPE, small=small)
        engine = engines.start_vllm(
            models.make_folder(config, Path(folder)), "bfloat16", sleep=True, cache_bytes=cache_bytes
        )
        unused, places = _unused(), workers.places_of(engine)
        trainer = Trainer(config, device)
        ceiling = PinnedCopies()
        ceiling.sample()
        models_of, optimizers = {"actor": trainer.actor}, {"adamw": trainer.optimizer}
        memory = wsync.MemoryManager(engine=engine, models=models_of, optimizers=optimizers)
        outcome = outcome_of(name, trainer.actor, _DTYPE, ())
        outcome.facts["bytes that vLLM's pools keep unused"] = unused
        _told(outcome, memory, lambda: _iterate(outcome, memory, engine, trainer))
        planned = predicted(config, cache_bytes, total)
        _check_stays(outcome, stays_of(memory.ledger.entries(), unused), planned)
        _check_room(outcome, memory, trainer, total)
        in_turn = len(memory.ledger.moves())
        _told(outcome, memory, lambda: _move_actor(memory))
        ceiling.sample()
        _check_speed(outcome, memory, in_turn, ceiling.medians())
        _told(outcome, memory, lambda: _check_weights(outcome, memory, engine, trainer.actor))
        _told(outcome, memory, lambda: check_places(outcome, engine, places))
    return outcome


def sglang_memory(name: str, *, layers: int = 4, device: str = "cuda") -> Outcome:
    """The same phases with an SGLang in processes of its own, which releases its tags; weights are new, not trained.

    Before that one sync for which only its KV cache leaves.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = models.config_of(models.DENSE, _DTYPE, layers=layers)
        engine = engines.start_sglang(models.make_folder(config, Path(folder)), "bfloat16", sleep=True)
        actor = models.make_actor(config, _DTYPE, 1, device)
        outcome, places = outcome_of(name, actor, _DTYPE, ()), workers.places_of(engine)
        _told_apart(outcome, engine, actor)
        memory = wsync.MemoryManager(engine=engine, models={"actor": actor})

        def turns() -> None:
            said = list[Answers]()
            for seed in range(2, 2 + ITERATIONS):
                memory.enter("rollout")
                said.append(engines.answers_of(engine))
                memory.enter("train")
                models.randomize(actor, seed)
                expected = models.greedy(actor, engines.prompts(), engines.NEW_TOKENS)
                wsync.sync(actor, engine, memory=memory)
                outcome.checks[f"tokens of weights {seed}"] = says(engine, expected, said)
            memory.enter("rollout")
            check_places(outcome, engine, places)

        _told(outcome, memory, turns)
        _check_stays(outcome, stays_of(memory.ledger.entries()), {})
        tags = {key: size or 0 for key, size in memory.sizes.items() if key.startswith("engine ")}
        asleep = [move.freed for move in memory.ledger.moves() if str(move.step) == "release engine weights"]
        outcome.facts["bytes that all tags gave back, each time"] = asleep
        outcome.checks["every tag gave memory back"] = bool(tags) and min(tags.values()) > 0
        outcome.checks["the tag of the weights has all of them"] = tags.get("engine weights", 0) >= outcome.nbytes
        engine.shutdown()
    return outcome


def _told_apart(outcome: Outcome, engine: Any, actor: Any) -> None:
    """As an engine with devices of its own: paused, it gives up its KV cache alone for the time of a sync."""
    said = [engines.answers_of(engine)]
    memory = wsync.MemoryManager(engine=engine, models={"actor": actor}, colocated=False)
    memory.enter("rollout")
    models.randomize(actor, 8)
    expected = models.greedy(actor, engines.prompts(), engines.NEW_TOKENS)
    wsync.sync(actor, engine, memory=memory)
    outcome.checks["tokens after the KV cache alone was away"] = says(engine, expected, said)
    freed = [move.freed for move in memory.ledger.moves() if str(move.step) == "release engine kv_cache"]
    outcome.facts["bytes that the KV cache alone gave back"] = freed
    outcome.checks["the KV cache alone gave memory back"] = bool(freed) and min(freed) > 0
    outcome.facts["steps with devices of its own"] = memory.ledger.moves_table().splitlines()
    memory.close()


def predicted(config: Any, cache_bytes: int, total: int) -> Mapping[str, int]:
    """Peak of each phase in bytes, as the planner has it for this run."""
    setting = Setting(
        model=model_of("actor", config.to_dict()),
        gpus=1,
        ranks=1,
        gpu_bytes=total,
        trainer="plain",
        actor_dtype=_DTYPE,
        compute_dtype=_DTYPE,
        state_dtype=_DTYPE,
        engine_dtype=_DTYPE,
        kv_bytes=cache_bytes,
        transport="inproc",
        micro_batch=1,
        sequence=_SEQUENCE,
        checkpointing=False,
    )
    return {plan.name: plan.peak for plan in predict(setting) if plan.name != "launch"}


def _iterate(outcome: Outcome, memory: wsync.MemoryManager, engine: Any, trainer: Trainer) -> None:
    seconds = []
    for _ in range(ITERATIONS):
        memory.enter("rollout")
        engines.answers_of(engine)
        memory.enter("train")
        trainer.step()
        seconds.append(wsync.sync(trainer.actor, engine, memory=memory).seconds)
    engines.answers_of(engine)
    memory.enter("rollout")  # nothing moves; the ledger hears of the peak
    outcome.facts |= {"seconds of each sync": seconds, "loss of each step": trainer.losses}
    outcome.checks["losses are numbers"] = all(map(math.isfinite, trainer.losses))


def _move_actor(memory: wsync.MemoryManager) -> None:
    """The actor alone comes and goes, while the engine keeps what it has."""
    for _ in range(ITERATIONS):
        with memory.using("actor"):
            pass


def _unused() -> int:
    """Bytes that are kept after the cache has been emptied: what is between the tensors of vLLM's pools."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _told(outcome: Outcome, memory: wsync.MemoryManager, work: Callable[[], None]) -> None:
    """Do it, and keep what was seen until it ended, whichever way."""
    try:
        work()
    except Exception:
        outcome.facts[f"error {len(outcome.facts)}"] = traceback.format_exc().splitlines()
        outcome.checks["ran to the end"] = False
    stats = torch.cuda.memory_stats()
    outcome.checks["no out-of-memory"] = stats.get("num_ooms", 0) == 0
    outcome.facts |= {
        "allocations that had to be tried again": stats.get("num_alloc_retries", 0),
        "ledger": memory.ledger.table().splitlines(),
        "steps": memory.ledger.moves_table().splitlines(),
        "every step": memory.ledger.to_json()["moves"],
        "bytes of each resident": dict(memory.sizes),
        "memory now": memory.report_memory(),
    }


def _check_stays(outcome: Outcome, stays: Mapping[str, Sequence[Stay]], planned: Mapping[str, int]) -> None:
    shown: dict[str, object] = {}
    for phase in ("rollout", "train", "sync"):
        later = stays.get(phase, ())[1:]
        if not later:
            outcome.checks[f"{phase} was entered twice"] = False
            continue
        row: dict[str, object] = {
            "bytes when entered": [stay.entered for stay in stays[phase]],
            "peak bytes": [stay.peak for stay in stays[phase]],
            "peak bytes with the allocator's cache": [stay.peak_cached for stay in stays[phase]],
            "growth from the second on": growth(later),
        }
        shown[phase] = row
        flat = growth(later) <= FLAT_BYTES
        outcome.checks[f"{phase} is flat from the second time on, to {FLAT_BYTES // MIB} MiB"] = flat
        if phase in planned:
            ratio = max(stay.peak for stay in later) / planned[phase]
            row |= {"predicted bytes": planned[phase], "peak to predicted": ratio}
            outcome.checks[f"peak of {phase} within {_NEAR:.0%} of the planner's"] = abs(ratio - 1) <= _NEAR
    outcome.facts["phases"] = shown


def _check_room(outcome: Outcome, memory: wsync.MemoryManager, trainer: Trainer, total: int) -> None:
    """All of it at once would not have fitted."""
    parts = {**{key: size or 0 for key, size in memory.sizes.items()}, "gradients": trainer.gradient_bytes}
    outcome.facts |= {
        "bytes by part": parts,
        "bytes of all parts": sum(parts.values()),
        "bytes of the device": total,
    }
    outcome.checks["all parts together would not fit"] = sum(parts.values()) > total


def _check_speed(outcome: Outcome, memory: wsync.MemoryManager, in_turn: int, ceiling: tuple[float, float]) -> None:
    """The actor's way, by itself. What the first `in_turn` moves took is told beside it.

    In turn the actor takes memory that the engine gave back just before, and the driver is not done with that.
    """
    nbytes, moves = memory.sizes["actor"] or 0, memory.ledger.moves()
    for step, fastest in zip(("release actor", "restore actor"), ceiling, strict=True):
        turn, alone = (
            [move.seconds for move in some if str(move.step) == step] for some in (moves[:in_turn], moves[in_turn:])
        )
        if not alone:
            outcome.checks[f"{step} was timed"] = False
            continue
        speed = nbytes / statistics.median(alone)
        outcome.facts[f"{step}, GB/s"] = {"median": speed / 1e9, "pinned copy": fastest / 1e9, "seconds": alone}
        outcome.facts[f"{step} in turn, seconds"] = turn
        outcome.checks[f"{step} at {_FAST:.0%} of a pinned copy"] = speed >= _FAST * fastest


def _check_weights(outcome: Outcome, memory: wsync.MemoryManager, engine: Any, actor: Any) -> None:
    """The bytes that training left, against vLLM's own loader; then tokens of weights that make choices clear."""
    [model] = engine.collective_rpc("get_model")
    with memory.using("actor"):
        got = {key: tensor.to("cpu", copy=True) for key, tensor in model.named_parameters()}
        load_directly(engine, model, models.engine_side(actor))
        outcome.checks["bytes as from load_weights"] = all(
            torch.equal(tensor.view(torch.uint8), got.pop(key).to(tensor.device).view(torch.uint8))
            for key, tensor in model.named_parameters()
        )
    said = [engines.answers_of(engine)]
    with memory.using("actor"):
        models.randomize(actor, 7)
        expected = models.greedy(actor, engines.prompts(), engines.NEW_TOKENS)
    wsync.sync(actor, engine, memory=memory)
    outcome.checks["tokens after sleep, sync and wake"] = says(engine, expected, said)
