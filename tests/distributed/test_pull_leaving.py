"""Ranks that stand still, or leave, while an engine reads their weights: it serves one version, or refuses to."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import wsync
from tests.distributed.sharded_models import full_tensors, llama, shard
from wsync import wire
from wsync.bench.receiver import BareEngine
from wsync.pull import host_reads
from wsync.rank_links import At
from wsync.rank_zero import RankZero
from wsync.session import Session
from wsync.testing.ranks import Rank, run_ranks

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
PROBE_BYTES = 64
"""All that is read of a rank when a session connects."""


class Scene:
    """Three FSDP2 ranks, and an engine in the process of rank 0 that has a first version of their weights."""

    def __init__(self, me: Rank, timeout_s: float) -> None:
        self.me = me
        self.pids: list[Any] = [None] * me.world_size
        dist.all_gather_object(self.pids, os.getpid())
        self.model = shard(llama())
        self.engine = BareEngine({name: torch.zeros_like(full) for name, full in full_tensors(self.model).items()})
        self.mine = self.engine if me.rank == 0 else None
        config = wsync.SyncConfig(path="pull", timeout_s=timeout_s)
        self.session = wsync.connect(self.model, self.mine, config=config)
        self.session.sync()
        self.change(2.0)

    def change(self, factor: float) -> None:
        """Other weights on this rank, as an optimizer gives them."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                local: Any = parameter
                local._local_tensor.mul_(factor)

    def say(self, word: str) -> None:
        """For `heard` on another rank."""
        self.me.store.set(word, "")

    def heard(self, word: str) -> None:
        """Once it was said."""
        self.me.store.wait([word], timedelta(seconds=PATIENCE_S))

    def heal(self) -> None:
        """*Collective.* The next sync brings what the ranks have now."""
        dist.barrier()
        self.session.sync()
        expected = full_tensors(self.model)
        assert self.mine is None or all(torch.equal(self.engine.tensors[n], t) for n, t in expected.items())

    def serves_nothing(self) -> bool:
        """Whether the engine says so."""
        try:
            self.engine.version()
        except wsync.EngineStateError as error:
            return "no consistent version" in str(error)
        return False


@contextmanager
def others_in(phase: str) -> Iterator[threading.Event]:
    """On rank 0: set when the other two have said all that they have to say in `phase`."""
    put, here, both = RankZero._put, set[int](), threading.Event()

    def heard(self: RankZero, rank: int, at: At, message: bytes) -> bool:
        taken = put(self, rank, at, message)
        said: Any = wire.unpack(message)
        here.update([rank] if rank and said["phase"] == phase else [])
        if len(here) == 2:
            both.set()
        return taken

    RankZero._put = heard  # type: ignore[method-assign]
    try:
        yield both
    finally:
        RankZero._put = put  # type: ignore[method-assign]


@contextmanager
def halfway(source: int, act: Callable[[], None]) -> Iterator[None]:
    """On rank 0: `act` when half of what is read of process `source` is there, and the other ranks only wait."""
    read = host_reads._read_runs

    def read_runs(pid: int, moves: Any) -> None:
        if pid == source and sum(len(froms) * nbytes for froms, _, nbytes in moves) > PROBE_BYTES:
            host_reads._read_runs = read
            read(pid, [(froms, tos, nbytes // 2) for froms, tos, nbytes in moves if nbytes > 1])
            assert others_wait.wait(PATIENCE_S)
            act()
        read(pid, moves)

    with others_in("load") as others_wait:
        host_reads._read_runs = read_runs
        try:
            yield
        finally:
            host_reads._read_runs = read


@contextmanager
def before_it_is_published(engine: BareEngine, act: Callable[[], None]) -> Iterator[None]:
    """On rank 0: `act` when all is loaded, and the other ranks have said so. Devices may still read then."""
    finish = engine.finish

    def act_and_finish(*args: Any) -> None:
        assert others_wait.wait(PATIENCE_S)
        act()
        finish(*args)

    with others_in("finish") as others_wait:
        engine.finish = act_and_finish  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            engine.finish = finish  # type: ignore[method-assign]


class Interrupted(Exception):
    """What a signal handler of the trainer raises."""


def interrupt(number: int, frame: object) -> None:
    """The handler."""
    raise Interrupted


def a_rank_is_interrupted(me: Rank, while_read: bool) -> str:
    """Rank 2 is called out of the sync by its trainer, while it is read or later, and takes a step."""
    scene = Scene(me, timeout_s=20.0)
    if me.rank == 2:
        signal.signal(signal.SIGUSR1, interrupt)
        with pytest.raises(Interrupted):
            scene.session.sync()
        scene.change(3.0)
        scene.say("trains on")
        words = ""
    else:

        def call() -> None:
            os.kill(scene.pids[2], signal.SIGUSR1)
            scene.heard("trains on")

        moment = halfway(scene.pids[2], call) if while_read else before_it_is_published(scene.engine, call)
        with moment if me.rank == 0 else nullcontext(), pytest.raises(wsync.RankError) as caught:
            scene.session.sync()
        assert me.rank or scene.serves_nothing()
        words = str(caught.value)
    scene.heal()
    return words


def the_owner_stops_and_the_others_train_on(me: Rank) -> str:
    """Rank 0, with its engine, stops between two steps of a sync while rank 2 is read, until the others gave up."""
    scene = Scene(me, timeout_s=2.0)
    if me.rank == 0:
        words = stopped_in_the_middle(scene)
    else:
        with pytest.raises(wsync.RankError) as caught:
            scene.session.sync()
        words = str(caught.value)
        scene.change(3.0)
        scene.say(f"rank {me.rank} trains on")
    if me.rank == 1:
        scene.heard("rank 2 trains on")
        os.kill(scene.pids[0], signal.SIGCONT)
    scene.heal()
    return words


def stopped_in_the_middle(scene: Scene) -> str:
    """The sync of rank 0, which stops itself when half of rank 2 is read. Returns how it failed."""
    read, goes_on, join = threading.Event(), threading.Event(), Session._join

    def wait() -> None:
        read.set()
        assert goes_on.wait(PATIENCE_S)

    def stop(self: Session, results: Any) -> bool:
        assert read.wait(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGSTOP)
        goes_on.set()
        return join(self, results)

    Session._join = stop  # type: ignore[method-assign]
    try:
        with halfway(scene.pids[2], wait), pytest.raises(wsync.WsyncError) as caught:
            scene.session.sync()
    finally:
        Session._join = join  # type: ignore[method-assign]
    assert scene.serves_nothing()
    return str(caught.value)


def a_rank_stops(me: Rank) -> tuple[str, bool]:
    """Rank 2 stops while it is read. It goes on when rank 0 has given up."""
    scene = Scene(me, timeout_s=2.0)

    def stop() -> None:
        os.kill(scene.pids[2], signal.SIGSTOP)

    on_rank_0 = halfway(scene.pids[2], stop) if me.rank == 0 else nullcontext()
    with on_rank_0, pytest.raises(wsync.RankError) as caught:
        scene.session.sync()
    torn = me.rank == 0 and scene.serves_nothing()
    if me.rank == 0:
        os.kill(scene.pids[2], signal.SIGCONT)
    scene.heal()
    return str(caught.value), torn


@pytest.mark.parametrize("while_read", [True, False])
def test_no_mixture_is_served_when_a_rank_left_the_sync(while_read: bool) -> None:
    words = run_ranks(a_rank_is_interrupted, 3, while_read, timeout_s=120)
    assert all("rank 2: Interrupted" in word for word in words[:2]), words


def test_no_mixture_is_served_when_the_owner_of_the_engine_was_stopped() -> None:
    words = run_ranks(the_owner_stops_and_the_others_train_on, 3, timeout_s=120)
    assert all("[0] did not reach phase 'load'" in word for word in words[1:]), words


def test_a_rank_that_is_stopped_while_it_is_read() -> None:
    found = run_ranks(a_rank_stops, 3, timeout_s=120)
    assert all("[2] did not reach phase 'finish'" in words for words, _ in found[:2]), found
    assert [torn for _, torn in found] == [True, False, False]
