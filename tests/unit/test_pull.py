"""Who pulls what from whom, and who cannot: on plain data and in one process."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import wsync
from wsync.adapters.trainers.module import ModuleProducer
from wsync.bench.receiver import BareEngine
from wsync.deadline import Deadline
from wsync.errors import EngineStateError, MismatchError, ProtocolError, UnsupportedError
from wsync.group import Group
from wsync.lines import Line
from wsync.plan import Plan, TensorSpec
from wsync.protocols.pull import ExportingProducer, PullingEngine
from wsync.pull.exports import Export, Probed, Share
from wsync.pull.ranks import Ranks
from wsync.pull.sources import Sources, unreadable
from wsync.pull.staging import Staging
from wsync.regions import Region
from wsync.replay import Step
from wsync.topology import local_endpoint
from wsync.transports.nothing import NoSender
from wsync.views import Place

PULL = wsync.SyncConfig(path="pull", timeout_s=20.0)
HERE = local_endpoint("cpu")


class Linear(nn.Linear):
    """Two tensors."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(8, 4, dtype=dtype)


def engine_for(module: nn.Module, dtype: torch.dtype | None = None) -> BareEngine:
    return BareEngine({name: torch.zeros_like(p, dtype=dtype) for name, p in module.named_parameters()})


def test_engines_and_producers_of_ours_can_be_pulled() -> None:
    assert isinstance(engine_for(Linear()), PullingEngine)
    assert isinstance(ModuleProducer(Linear()), ExportingProducer)


def test_files_of_a_checkpoint_are_read_where_they_are_mapped(tmp_path: Path) -> None:
    actor = Linear()
    engine = engine_for(actor)
    save_file({name: p.detach() for name, p in actor.named_parameters()}, tmp_path / "model.safetensors")
    for _ in range(2):
        assert wsync.sync(str(tmp_path), engine, config=PULL).pulled_nbytes == 36 * 4
        assert all(torch.equal(engine.tensors[n], p) for n, p in actor.named_parameters())


def test_a_checkpoint_that_is_written_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Linear()
    engine, file = engine_for(actor), tmp_path / "model.safetensors"
    save_file({name: p.detach() for name, p in actor.named_parameters()}, file)
    with wsync.connect(str(tmp_path), engine, config=PULL) as session:
        session.sync()
        read_into = Sources.read_into

        def touched(self: Sources, targets: Mapping[str, torch.Tensor]) -> int:
            os.utime(file, ns=(1, 1))
            return read_into(self, targets)

        monkeypatch.setattr(Sources, "read_into", touched)
        with pytest.raises(MismatchError, match="was written while a sync read it"):
            session.sync()
        with pytest.raises(EngineStateError, match="no consistent version"):
            engine.version()


def test_a_worker_that_cannot_read_is_refused_before_anything_changes() -> None:
    actor = Linear()
    engine = engine_for(actor)
    engine.probe = lambda probes, deadline: ["the kernel forbids it"]  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="worker 0 of bare: the kernel forbids it"):
        wsync.sync(actor, engine, config=PULL)
    assert all(not tensor.any() for tensor in engine.tensors.values())
    assert engine.version() == 0


def test_a_served_engine_is_refused() -> None:
    actor, behind = Linear(), engine_for(Linear())
    with wsync.serve(behind) as served:
        remote = wsync.RemoteEngine(served.address, secret=served.secret, timeout_s=20.0)
        with pytest.raises(UnsupportedError, match="reached in a way that does not pass on where weights lie"):
            wsync.sync(actor, remote, config=PULL)
        remote.disconnect()


def test_what_would_be_rounded_twice_travels() -> None:
    actor = Linear()
    engine = engine_for(actor)  # fp32 on both sides
    with pytest.raises(UnsupportedError, match="none of weight, bias lies in the memory of a rank"):
        wsync.sync(actor, engine, config=replace(PULL, dtype=torch.bfloat16))
    assert wsync.sync(actor, engine, config=replace(PULL, path="buckets", dtype=torch.bfloat16)).pulled_nbytes == 0


def test_a_cast_on_the_way_is_one_rounding() -> None:
    actor = Linear()
    engine = engine_for(actor, torch.bfloat16)
    report = wsync.sync(actor, engine, config=PULL)
    assert report.pulled_nbytes == 36 * 4
    assert all(torch.equal(engine.tensors[n], p.to(torch.bfloat16)) for n, p in actor.named_parameters())


def test_an_update_without_exports_is_refused() -> None:
    actor = Linear()
    engine = engine_for(actor)
    with wsync.connect(actor, engine, config=PULL) as session:
        session.sync()
        engine.take_exports = lambda exports, address, deadline: 0.0  # type: ignore[method-assign]
        session.release_slots()
        with pytest.raises(wsync.PeerError, match="nobody said where the weights lie"):
            session.sync()
        assert engine.version() == 1


@pytest.mark.parametrize("ending", ["release_slots", "close"])
def test_after_a_failed_sync_workers_let_go_too(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    closed: list[Sources] = []
    close = Sources.close

    def counted(self: Sources) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(Sources, "close", counted)
    actor = Linear()
    engine = engine_for(actor)
    session = wsync.connect(actor, engine, config=PULL)
    session.sync()
    with monkeypatch.context() as patch:
        patch.setattr(Sources, "read_into", broken)
        with pytest.raises(wsync.PeerError, match="the device failed"):
            session.sync()
    getattr(session, ending)()
    assert len(closed) == 1
    session.close()


def broken(self: Sources, targets: object) -> int:
    raise RuntimeError("the device failed")


def test_a_worker_that_comes_too_late_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Linear()
    engine = engine_for(actor)
    with wsync.connect(actor, engine, config=PULL) as session:
        session.sync()
        before = {name: tensor.clone() for name, tensor in engine.tensors.items()}
        clock = time.monotonic
        begin = engine.loader.begin

        def late() -> None:
            begin()
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 60.0)

        monkeypatch.setattr(engine.loader, "begin", late)
        with torch.no_grad():
            actor.weight.add_(1)
        with pytest.raises(wsync.WsyncError, match="its turn to read the trainer's weights"):
            session.sync()
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.tensors.items())


class Store:
    """A group in which a round may be missed."""

    rank, world_size = 0, 2

    def __init__(self, other: Export) -> None:
        self.other: Export | None = other

    def gather(self, phase: str, make: Callable[[], object], deadline: Deadline) -> list[object]:
        return [make(), self.other]

    def settle(self, deadline: Deadline) -> None:
        """Nothing was transferred."""


def test_what_another_rank_said_is_forgotten_with_the_session_s_workers() -> None:
    """A rank that left the round alone must hear the others' addresses again: all of them forget when they attach."""
    actor = Linear()
    producer = ModuleProducer(actor)
    plan = Plan.pack(producer.metadata(), 4096, {"weight", "bias"})
    producer.prepare(plan, [0], Group(0, 1, None, 5.0))
    assert plan.pulled is not None
    group = Store(exported(1, [(Region.span(0, 4), torch.zeros(4))]))
    ranks = Ranks(producer, plan.pulled, Staging(), group)  # type: ignore[arg-type]
    ranks.open(Deadline.after(5.0), meanwhile=lambda: None)
    told: list[list[int]] = []
    engine = engine_for(actor)

    def take_exports(exports: Sequence[Export], address: str, deadline: Deadline) -> float:
        told.append([one.rank for one in exports])
        return 0.0

    engine.take_exports = take_exports  # type: ignore[method-assign]
    line = Line(transport="pull", sender=NoSender(0), engines=(engine,), by_reference=False)
    ranks.tell([line], Deadline.after(5.0))
    ranks.tell([line], Deadline.after(5.0))
    ranks.forget()
    group.other = None
    ranks.open(Deadline.after(5.0), meanwhile=lambda: None)
    ranks.tell([line], Deadline.after(5.0))
    assert told == [[0, 1], [0]]


def test_exports_without_a_plan_to_pull_are_refused() -> None:
    actor = Linear()
    engine = engine_for(actor)
    with wsync.connect(actor, engine) as session:
        session.sync()
        with pytest.raises(wsync.PeerError, match="no plan is attached that has anything to pull"):
            engine.take_exports([], "", Deadline.after(5.0))


def attach_and_tell(session: wsync.Session) -> None:
    """All that a sync of `session` does before its engines begin."""
    session._attach()
    assert session._ranks is not None
    session._ranks.open(Deadline.after(5.0), meanwhile=lambda: None)
    session._ranks.tell(session._lines, Deadline.after(5.0))
    session._producer.close()


@pytest.mark.parametrize("moment", ["tell", "begin"])
@pytest.mark.parametrize("told", [False, True], ids=["first sync", "later sync"])
def test_another_session_in_the_middle_does_not_swap_the_weights(
    moment: str, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session of another thread attaches the engine to itself, and says where its own weights are."""
    actor, other = Linear(), Linear()
    engine = engine_for(actor)
    with wsync.connect(actor, engine, config=PULL) as one, wsync.connect(other, engine, config=PULL) as two:
        if told:
            one.sync()
        where, name = (Ranks, "tell") if moment == "tell" else (type(engine), "begin")
        inner = getattr(where, name)

        def taken(self: object, *args: Any, **kwargs: Any) -> object:
            monkeypatch.setattr(where, name, inner)
            attach_and_tell(two)
            return inner(self, *args, **kwargs)

        monkeypatch.setattr(where, name, taken)
        with pytest.raises((EngineStateError, wsync.PeerError), match="another session took the engine"):
            one.sync()
        for session, right in ((two, other), (one, actor), (two, other)):
            session.sync()
            assert all(torch.equal(engine.tensors[n], p) for n, p in right.named_parameters())


def test_who_lost_the_engine_cannot_tell_its_workers_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, other = Linear(), Linear()
    engine = engine_for(actor)
    with wsync.connect(actor, engine, config=PULL) as one, wsync.connect(other, engine, config=PULL) as two:
        attach_and_tell(one)
        assert one._ranks is not None
        late, ranks, begin = one._lines, one._ranks, type(engine).begin
        ranks._told = False

        def told(self: BareEngine, *args: Any, **kwargs: Any) -> None:
            with pytest.raises(wsync.PeerError, match="another session took the engine"):
                ranks.tell(late, Deadline.after(5.0))
            begin(self, *args, **kwargs)

        monkeypatch.setattr(type(engine), "begin", told)
        two.sync()
    assert all(torch.equal(engine.tensors[n], p) for n, p in other.named_parameters())


def exported(rank: int, parts: Sequence[tuple[Region, torch.Tensor]], process: str = "") -> Export:
    """Parts of tensor 0, each contiguous in a tensor of its own."""
    return Export(
        rank=rank,
        endpoint=replace(HERE, process=process or HERE.process),
        segments=(),
        addresses=tuple(tensor.data_ptr() for _, tensor in parts),
        sizes=tuple(tensor.nbytes for _, tensor in parts),
        parts=tuple(
            Share(
                tensor=0,
                elements=region,
                place=Place(memory=number, dtype=tensor.dtype, region=Region.whole(region.sizes)),
            )
            for number, (region, tensor) in enumerate(parts)
        ),
    )


def sources(exports: Sequence[Export], needed: Region) -> Sources:
    plan = Plan.pack([TensorSpec(name="w", shape=(8, 8), dtype=torch.float32)], 4096, {"w"})
    step = Step(tensor=0, src=needed, target="w", dst=Region.whole(needed.sizes))
    assert plan.pulled is not None
    return Sources(plan.pulled, [step], {"w": torch.float32}, exports, HERE)


def test_only_what_is_needed_is_read_wherever_it_lies() -> None:
    full = torch.arange(64, dtype=torch.float32).view(8, 8)
    upper, lower = full[:4].clone(), full[4:].clone()
    found = torch.zeros(8, 3)
    both = [exported(0, [(Region.span(0, 32), upper)]), exported(1, [(Region.span(32, 32), lower)])]
    nbytes = sources(both, Region(2, (8, 3), (8, 1))).read_into({"w": found})
    assert torch.equal(found, full[:, 2:5])
    assert nbytes == 8 * 3 * 4


def test_a_part_that_nobody_has_and_parts_that_overlap() -> None:
    upper = torch.zeros(32)
    with pytest.raises(ProtocolError, match="no trainer rank exports some part of w"):
        sources([exported(0, [(Region.span(0, 32), upper)])], Region.whole((8, 8)))
    uneven = [exported(0, [(Region.span(0, 40), torch.zeros(40))]), exported(1, [(Region.span(32, 32), upper)])]
    with pytest.raises(UnsupportedError, match="w: trainer ranks hold parts that overlap"):
        sources(uneven, Region.whole((8, 8)))


def test_a_probe_of_another_host_or_another_namespace_is_told_apart() -> None:
    probed = Probed(3, torch.device("cpu"))
    assert unreadable([probed.probe], HERE) == ""
    assert "where the worker has them, on cuda:1" in unreadable([probed.probe], replace(HERE, device="cuda:1"))
    elsewhere = replace(probed.probe, endpoint=replace(HERE, host="another"))
    assert "trainer rank 3 " in unreadable([elsewhere], HERE)
    assert "is on another host" in unreadable([elsewhere], HERE)
    other = replace(probed.probe, value=bytes(64))
    assert "they are in different namespaces" in unreadable([other], HERE)
    nobody = replace(probed.probe, address=4096)
    assert "cannot be read: Bad address" in unreadable([nobody], HERE)
