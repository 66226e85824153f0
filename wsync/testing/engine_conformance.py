"""What every engine must do when it is synced, as plain functions that raise `AssertionError`.

    for check in ENGINE_CHECKS:
        check(EngineBench(engine=..., transport=..., make_actor=..., resident=..., serve=...))

Each check leaves the engine serving the weights of its last actor, so one started engine goes through all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

import wsync
from wsync.deadline import Deadline
from wsync.protocols import Engine, Transport
from wsync.registry import engine_for
from wsync.testing.chaos import ChaosTransport, Fault

BUCKET_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBench:
    """An engine under test, and how to look at it from outside."""

    engine: object
    """What is passed to `wsync.connect`. It has just been started, or has passed another check."""

    transport: Transport
    """One that serves it. Faults are put around it."""

    make_actor: Callable[[int], nn.Module]
    """seed -> a module whose weights the engine takes, all different for each seed, of several buckets of 64 KiB."""

    resident: Callable[[nn.Module], Mapping[str, tuple[torch.Tensor, torch.Tensor]]]
    """actor -> every live tensor of the engine beside what it is when the actor's weights are in it."""

    serve: Callable[[], object]
    """Generate a little. The answer depends on the weights and on nothing else."""

    timeout_s: float = 60.0

    def sync(
        self, actor: nn.Module, fault: Fault | None = None, version: int | None = None, **changes: object
    ) -> wsync.SyncReport:
        """One sync in a session of its own, with `fault` on the way."""
        transport = self.transport if fault is None else ChaosTransport(self.transport, fault)
        config = wsync.SyncConfig(bucket_bytes=BUCKET_BYTES, timeout_s=self.timeout_s, transport=transport)
        with wsync.connect(actor, self.engine, config=replace(config, **changes)) as session:  # type: ignore[arg-type]
            return session.sync(version)

    def holds(self, actor: nn.Module) -> bool:
        """Whether every live tensor of the engine is bit-equal to the actor's."""
        pairs = self.resident(actor)
        assert pairs, "the bench shows no tensor"
        return all(_same_bits(live, wanted) for live, wanted in pairs.values())

    def control(self) -> Engine:
        """The engine's control half."""
        return engine_for(self.engine)


def check_three_syncs(bench: EngineBench) -> None:
    """New weights each time, in one session: bit-equal, served, versions grow by one, other answers than before."""
    actors = [bench.make_actor(seed) for seed in (1, 2, 3)]
    before = bench.control().last_version()
    answers = []
    config = wsync.SyncConfig(bucket_bytes=BUCKET_BYTES, timeout_s=bench.timeout_s, verify="digest")
    with wsync.connect(actors[0], bench.engine, config=config) as session:
        for turn, actor in enumerate(actors, start=1):
            _copy_weights(actor, actors[0])
            report = session.sync()
            assert report.version == before + turn, f"version {report.version} after {turn} syncs from {before}"
            assert bench.holds(actor), f"sync {turn} did not leave the actor's weights"
            answers.append(repr(bench.serve()))
    assert len(set(answers)) > 1, "three sets of weights gave one answer: this bench shows nothing"


def check_pause(bench: EngineBench) -> None:
    """Between pause and resume new work is refused; afterwards the answers are what they were."""
    bench.sync(bench.make_actor(15))
    answer = bench.serve()
    engine = bench.control()
    engine.pause("abort", Deadline.after(bench.timeout_s))
    _expect(wsync.EngineStateError, bench.serve)
    engine.resume()
    assert bench.serve() == answer


def check_bad_input(bench: EngineBench) -> None:
    """What does not fit is refused before a byte is moved, and the old version goes on serving."""
    good = bench.make_actor(4)
    bench.sync(good)
    answer = bench.serve()
    lacking, reshaped = bench.make_actor(5), bench.make_actor(5)
    name, parameter = next((n, p) for n, p in lacking.named_parameters() if p.ndim == 2)
    owner, _, leaf = name.rpartition(".")
    delattr(lacking.get_submodule(owner), leaf)
    setattr(reshaped.get_submodule(owner), leaf, nn.Parameter(parameter.detach()[:-1].clone()))
    for actor in (lacking, reshaped):
        _expect(wsync.MismatchError, partial(bench.sync, actor))
    _expect(wsync.ConfigError, lambda: bench.sync(good, version=bench.control().last_version()))
    assert bench.holds(good), "refused input changed the weights"
    assert bench.serve() == answer


def check_failure_before_a_byte(bench: EngineBench) -> None:
    """A sync that fails before its first bucket arrives leaves the old version serving."""
    good = bench.make_actor(6)
    bench.sync(good)
    answer = bench.serve()
    _expect(wsync.TransportError, lambda: bench.sync(bench.make_actor(7), Fault(kind="raise", bucket=0)))
    assert bench.holds(good), "nothing had been sent, and yet the weights changed"
    assert bench.serve() == answer


def check_failure_in_the_middle(bench: EngineBench) -> None:
    """A sync that fails after some buckets leaves an engine that refuses to serve, until a full sync heals it."""
    bench.sync(bench.make_actor(8))
    _expect(wsync.TransportError, lambda: bench.sync(bench.make_actor(9), Fault(kind="raise", bucket=2)))
    _expect(wsync.EngineStateError, bench.serve)
    _heal(bench)


def check_spoiled_bytes(bench: EngineBench) -> None:
    """With `verify="digest"` a flipped bit or two exchanged words are found, and never served."""
    for fault in (Fault(kind="flip", bucket=1, seed=11), Fault(kind="swap", bucket=1, seed=11)):
        _expect(wsync.DigestError, partial(bench.sync, bench.make_actor(10), fault, verify="digest"))
        assert fault.done, "the fault found nothing to spoil"
        _expect(wsync.EngineStateError, bench.serve)
        _heal(bench)


def check_lost_and_repeated_buckets(bench: EngineBench) -> None:
    """A commit that is lost or comes twice is an error, not other weights."""
    for fault in (Fault(kind="drop", bucket=1), Fault(kind="duplicate", bucket=1)):
        _expect(wsync.WsyncError, partial(bench.sync, bench.make_actor(12), fault))
        _expect(wsync.EngineStateError, bench.serve)
        _heal(bench)


def check_sleep(bench: EngineBench) -> None:
    """Level 2: nothing serves and nothing is sent until the weights are awake; then only a full sync makes it serve."""
    engine = bench.control()
    engine.sleep(2)
    _expect(wsync.EngineStateError, bench.serve)
    _expect(wsync.EngineStateError, lambda: bench.sync(bench.make_actor(13)))
    _expect(wsync.EngineStateError, lambda: engine.wake_up(["kv_cache"]))
    engine.wake_up(["weights"])
    _expect(wsync.EngineStateError, bench.serve)
    actor = bench.make_actor(14)
    bench.sync(actor)
    engine.wake_up(["kv_cache"])
    assert bench.holds(actor), "a sync between the two halves of a wake did not leave the actor's weights"
    bench.serve()


def check_cache_alone(bench: EngineBench) -> None:
    """The KV cache sleeps alone, where the engine can do that: weights are synced meanwhile, nothing serves."""
    engine = bench.control()
    try:
        engine.check_sleep(["kv_cache"])
    except wsync.UnsupportedError:
        _expect(wsync.UnsupportedError, lambda: engine.sleep(tags=["kv_cache"]))
        bench.serve()
        return
    engine.sleep(tags=["kv_cache"])
    _expect(wsync.EngineStateError, bench.serve)
    _expect(wsync.EngineStateError, lambda: engine.sleep(2))
    actor = bench.make_actor(15)
    bench.sync(actor)
    _expect(wsync.EngineStateError, bench.serve)
    engine.wake_up(["kv_cache"])
    assert bench.holds(actor), "a sync while the cache slept did not leave the actor's weights"
    bench.serve()


ENGINE_CHECKS: tuple[Callable[[EngineBench], None], ...] = (
    check_three_syncs,
    check_pause,
    check_bad_input,
    check_failure_before_a_byte,
    check_failure_in_the_middle,
    check_spoiled_bytes,
    check_lost_and_repeated_buckets,
    check_sleep,
    check_cache_alone,
)


def _heal(bench: EngineBench) -> None:
    actor = bench.make_actor(99)
    bench.sync(actor)
    assert bench.holds(actor), "the sync after a failure did not leave the actor's weights"
    bench.serve()


def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    with torch.no_grad():
        for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
            mine.copy_(theirs)


def _same_bits(live: torch.Tensor, wanted: torch.Tensor) -> bool:
    return live.dtype == wanted.dtype and torch.equal(_bits(live), _bits(wanted))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _expect(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")
