"""Who pulls what from whom, and who cannot: on plain data and in one process."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import wsync
from wsync.adapters.trainers.module import ModuleProducer
from wsync.bench.receiver import BareEngine
from wsync.deadline import Deadline
from wsync.errors import ProtocolError, UnsupportedError
from wsync.plan import Plan, TensorSpec
from wsync.protocols.pull import ExportingProducer, PullingEngine
from wsync.pull.exports import Export, Probed, Share
from wsync.pull.sources import Sources, unreadable
from wsync.regions import Region
from wsync.replay import Step
from wsync.topology import local_endpoint
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
        engine.take_exports = lambda exports, deadline: 0.0  # type: ignore[method-assign]
        session.release_slots()
        with pytest.raises(wsync.PeerError, match="nobody said where the weights lie"):
            session.sync()
        assert engine.version() == 1


def test_exports_without_a_plan_to_pull_are_refused() -> None:
    actor = Linear()
    engine = engine_for(actor)
    with wsync.connect(actor, engine) as session:
        session.sync()
        with pytest.raises(wsync.PeerError, match="no plan is attached that has anything to pull"):
            engine.take_exports([], Deadline.after(5.0))


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
    return Sources(plan.pulled, [step], exports, HERE)


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
