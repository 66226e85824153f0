"""A trainer on one GPU, vLLM in a world of its own on another, weights over NCCL, beside bare broadcasts and rivals."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore

import wsync
from wsync.bench.gpu import engines, models
from wsync.bench.gpu.checks import check_tokens, free, in_place, outcome_of, says
from wsync.bench.gpu.far import LOOPBACK, Far
from wsync.bench.gpu.nccl_loops import Each, Packed
from wsync.bench.gpu.outcome import Limit, Outcome, in_turn
from wsync.bench.gpu.raw_peer import RawRank
from wsync.bench.samples import Way
from wsync.config import MIB
from wsync.session import Session

RAW, PACKED, EACH = "bare broadcast", "nccl packed", "push each"

_BUCKET_BYTES = 512 * MIB
_SMALL_BYTES = 64 * MIB
_NUM_SLOTS = 4
"""A bucket takes the hosts half a millisecond to agree on; with four under way the devices never wait for that."""

_TIMEOUT_S = 60.0
_FREED_S = 10.0
_NEAR_BYTES = 64 * MIB
_FEW = 4


def beside_raw(name: str, rounds: int) -> Outcome:
    """A module into a vLLM on the other GPU; bare broadcasts of as many bytes between the same two in turn."""
    limits = (Limit(reference=RAW, factor=1.25),)
    with _worlds(name, limits) as (actor, far, engine, outcome), _raw(outcome.nbytes) as raw:
        with wsync.connect(actor, engine, config=_settings(_BUCKET_BYTES)) as session:
            outcome.checks["goes over nccl"] = "nccl to 1 worker(s)" in session.explain()
            _memory(outcome, session, far)
            outcome.samples = in_turn(session.sync, {RAW: raw}, rounds)
            outcome.facts["stages of the last sync, s"] = dict(session.sync().stages)
            check_tokens(outcome, session, actor, far)
        with wsync.connect(actor, engine, config=_settings(_SMALL_BYTES)) as session:
            small = in_turn(session.sync, {RAW: raw}, _FEW)
            outcome.facts[f"seconds in buckets of {_SMALL_BYTES} bytes"] = small.median_s
            outcome.facts["seconds of bare broadcasts beside them"] = small.reference_median_s(RAW)
    return outcome


def beside_rivals(name: str, rounds: int) -> Outcome:
    """The same, and in turn what trainers do today."""
    limits = (Limit(reference=PACKED, factor=1.0), Limit(reference=EACH, factor=1.0))
    with (
        _worlds(name, limits, "nccl") as (actor, far, engine, outcome),
        wsync.connect(actor, engine, config=_settings(_BUCKET_BYTES)) as session,
    ):
        session.sync()
        ways: dict[str, Callable[[nn.Module], None]] = {PACKED: Packed(far).send, EACH: Each(far).send}
        check_rivals(outcome, ways, actor, far)
        references: Mapping[str, Way] = {rival: _bound(send, actor) for rival, send in ways.items()}
        outcome.samples = in_turn(session.sync, references, rounds)
        check_tokens(outcome, session, actor, far)
    return outcome


def check_rivals(outcome: Outcome, ways: Mapping[str, Callable[[nn.Module], None]], actor: nn.Module, far: Far) -> None:
    """Each of them sends new weights; the engine says what transformers says, and not what it said before."""
    said = [engines.answers_of(far)]
    for seed, (rival, send) in enumerate(ways.items(), 5):
        models.randomize(actor, seed)
        torch.cuda.synchronize()  # vLLM packs on streams of its own, which do not wait for the trainer's
        send(actor)
        expected = models.greedy(actor, engines.prompts(), engines.NEW_TOKENS)
        outcome.checks[f"tokens of {rival}"] = says(far, expected, said)


def _settings(bucket_bytes: int) -> wsync.SyncConfig:
    return wsync.SyncConfig(
        transport="nccl", path="buckets", bucket_bytes=bucket_bytes, num_slots=_NUM_SLOTS, timeout_s=_TIMEOUT_S
    )


def _bound(send: Callable[[nn.Module], None], actor: nn.Module) -> Way:
    return lambda: send(actor)


@contextmanager
def _worlds(
    name: str, limits: tuple[Limit, ...], transfer: str = ""
) -> Iterator[tuple[Any, Far, wsync.RemoteEngine, Outcome]]:
    """The actor here, vLLM there, with a transfer of its own if one is named, and the outcome to fill in."""
    config = models.config_of(models.DENSE, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        place = models.make_folder(config, Path(folder))
        with Far("wsync.bench.gpu.far_vllm", str(place), transfer) as far:
            actor = models.make_actor(config, torch.bfloat16, 1)
            far.hear()
            address, secret = far.ask("reach")
            engine = wsync.RemoteEngine(address, secret=secret)
            outcome = outcome_of(name, actor, torch.bfloat16, limits)
            with in_place(outcome, far):
                yield actor, far, engine, outcome


@contextmanager
def _raw(nbytes: int) -> Iterator[Way]:
    """Bare broadcasts of `nbytes` to a process on the other GPU that does nothing else."""
    store = TCPStore(LOOPBACK, 0, None, True, timedelta(seconds=_TIMEOUT_S), False)
    with Far("wsync.bench.gpu.raw_peer", str(store.port)) as peer:
        rank = RawRank(store, 0)
        peer.hear()

        def broadcast() -> None:
            peer.tell("receive", nbytes)
            rank.broadcast(nbytes)
            torch.cuda.synchronize()
            peer.hear()  # as the sync does, which ends when the engine has loaded

        yield broadcast


def _memory(outcome: Outcome, session: Session, far: Far) -> None:
    """What a communicator takes on both devices, and whether it is there again once it is released."""
    session.sync()
    session.release_slots()
    before = _settled(far, (0, 0))
    session.sync()
    taken = [then - now for then, now in zip(before, _settled(far, (0, 0)), strict=True)]
    session.release_slots()
    after = _settled(far, before)
    slots = _NUM_SLOTS * _BUCKET_BYTES
    outcome.facts["bytes of slots on either device"] = slots
    outcome.facts["bytes of the communicator, trainer's and engine's device"] = [nbytes - slots for nbytes in taken]
    outcome.facts["bytes that release_slots left"] = [then - now for then, now in zip(before, after, strict=True)]
    outcome.checks["release_slots gives the communicator back"] = all(
        now >= then - _NEAR_BYTES for then, now in zip(before, after, strict=True)
    )


def _settled(far: Far, least: tuple[int, ...]) -> tuple[int, int]:
    """Free bytes here and there, as soon as they are `least`: the engine's side ends by itself."""
    patience = time.monotonic() + _FREED_S
    while True:
        free()
        seen = (torch.cuda.mem_get_info()[0], int(far.ask("free_bytes")))
        enough = all(now >= then - _NEAR_BYTES for now, then in zip(seen, least, strict=True))
        if enough or time.monotonic() > patience:
            return seen
