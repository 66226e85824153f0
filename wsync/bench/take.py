"""What every trainer rank of a row runs: weights, session, ceilings and loops in turn, and a look at the bytes."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

import wsync
from wsync import registry
from wsync.bench.actors import Trained, start
from wsync.bench.cases import numel_of
from wsync.bench.ceilings import MEMCPY_EACH, TWO_COPIES, cast_way, memcpy_ways, two_copies_way
from wsync.bench.host import Neighbour
from wsync.bench.job import LINK, Job, Taken
from wsync.bench.loops import Receiver, loops_for
from wsync.bench.receiver import BareEngine
from wsync.bench.samples import Samples, Way, seconds_of
from wsync.bench.weights import ACTOR_SEED, ENGINE_SEED, random_tensors
from wsync.testing.chaos import ChaosTransport
from wsync.testing.ranks import Rank
from wsync.testing.samples import digests_of

LOOP_ROUNDS = 3
"""Samples of each baseline at most: some take a hundred times as long as a sync."""

_WAIT_S = 120.0


def take(me: Rank, job: Job, folder: str, pipe: Connection | None, progress: Connection) -> Taken | None:
    """Measure `job`. The first rank says what came of it, the others None.

    Args:
        me: this rank.
        job: what to measure.
        folder: empty, for files that go with the row.
        pipe: to the engine's process; None: the engine is in the first rank's.
        progress: gets (what is done now, steps done, steps in all) from the first rank.
    """
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not mix with results
    bench = _Bench(me, job, progress)
    bench.say("making weights")
    trained = start(job.producer, me, job.shapes, job.actor_dtype, Path(folder))
    with _receiver(me, job, pipe) as receiver:
        loops = loops_for(trained, receiver, job.remote, job.dtype) if job.baselines else {}
        ceilings = _ceilings(trained, receiver, job) if me.rank == 0 else {}
        return bench.run(trained, receiver, ceilings, loops)


@contextmanager
def _receiver(me: Rank, job: Job, pipe: Connection | None) -> Iterator[Receiver]:
    if me.rank:
        yield None
    elif pipe is None:
        yield BareEngine(dict(random_tensors(job.shapes, ENGINE_SEED, job.dtype)))
    else:
        neighbour = Neighbour(pipe, min(job.timeout_s, _WAIT_S))
        try:
            yield neighbour
        finally:
            neighbour.close()


def _ceilings(trained: Trained, receiver: Receiver, job: Job) -> dict[str, Way]:
    """Ways of the first rank, on tensors that lie whole in its memory."""
    if trained.kind == "module":
        whole = [parameter.detach() for parameter in trained.actor.parameters()]
    else:
        whole = [tensor for _, tensor in random_tensors(job.shapes, ACTOR_SEED, job.actor_dtype)]
    same = job.actor_dtype == job.dtype
    one_pass = memcpy_ways(whole)[MEMCPY_EACH] if same else cast_way(whole, job.dtype)
    found: dict[str, Way] = {job.one_pass: one_pass}
    if isinstance(receiver, Neighbour):
        target = torch.ones(numel_of(job.shapes), dtype=job.dtype)
        found[TWO_COPIES] = two_copies_way(whole, target, job.bucket_bytes)
    if job.floor == LINK and isinstance(receiver, Neighbour):
        full, rest = divmod(job.nbytes, job.bucket_bytes)
        piece = torch.randint(256, (min(job.nbytes, job.bucket_bytes),), dtype=torch.uint8)
        pieces = [piece] * full + ([piece[:rest]] if rest else [])
        found[LINK] = lambda: receiver.broadcast_raw(pieces)
    return found


class _Bench:
    """Rounds on one rank, in step with the other ranks."""

    def __init__(self, me: Rank, job: Job, progress: Connection) -> None:
        self._me, self._job, self._progress = me, job, progress
        self._done = 0

    def say(self, doing: str) -> None:
        if self._me.rank == 0:
            with suppress(BrokenPipeError):
                self._progress.send((doing, self._done, self._job.rounds + 2))

    def run(
        self, trained: Trained, receiver: Receiver, ceilings: Mapping[str, Way], loops: Mapping[str, Way]
    ) -> Taken | None:
        """Everything once to warm up, then the rounds. The last sync has to put every byte right."""
        job, fault = self._job, self._job.fault
        transport: object = job.transport
        if fault is not None:
            fault.bucket = sys.maxsize
            transport = ChaosTransport(registry.transport(job.transport), fault)
        config = wsync.SyncConfig(
            bucket_bytes=job.bucket_bytes, transport=transport, timeout_s=min(job.timeout_s, _WAIT_S)
        )
        engine = receiver.engine if isinstance(receiver, Neighbour) else receiver
        self.say("connecting")
        with wsync.connect(trained.actor, engine, config=config) as session:
            self._step("warming up")
            for way in (*loops.values(), session.sync):
                self._seconds(way)
            own, reports = [], []
            around = [self._each(ceilings)]
            tried: list[Mapping[str, float]] = []
            for number in range(job.rounds):
                self._step(f"round {number + 1} of {job.rounds}")
                if len(tried) < LOOP_ROUNDS:
                    tried.append({name: self._seconds(way) for name, way in loops.items()})
                if number == job.rounds - 1 and receiver is not None:
                    receiver.spoil()
                    if fault is not None:
                        fault.bucket = 0
                own.append(self._seconds(lambda: reports.append(session.sync())))
                around.append(self._each(ceilings))
        self._step("comparing bytes")
        if receiver is None:
            return None
        middle = reports[sorted(range(job.rounds), key=own.__getitem__)[job.rounds // 2]]
        return Taken(
            samples=Samples(
                seconds=tuple(own), references={name: tuple(one[name] for one in around) for name in ceilings}
            ),
            loops={name: tuple(one[name] for one in tried) for name in loops},
            stages=middle.stages,
            through_loader=middle.through_loader,
            wrong=_wrong(receiver, job),
        )

    def _step(self, doing: str) -> None:
        self.say(doing)
        self._done += 1

    def _seconds(self, way: Way) -> float:
        """Until every rank is done."""

        def together() -> None:
            way()
            dist.barrier()

        dist.barrier()
        return seconds_of(together)

    def _each(self, ceilings: Mapping[str, Way]) -> dict[str, float]:
        return {name: seconds_of(way) for name, way in ceilings.items()}


def _wrong(receiver: Neighbour | BareEngine, job: Job) -> tuple[str, ...]:
    """Names of tensors that are not bit-equal to the actor's, which are made once more, in wire dtype."""
    found = receiver.digests()
    return tuple(
        name
        for name, tensor in random_tensors(job.shapes, ACTOR_SEED, job.actor_dtype)
        if found.get(name) != digests_of({name: tensor.to(job.dtype)})[name]
    )
