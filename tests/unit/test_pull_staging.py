"""Parts that are cast before they cross a link: which ones, within what memory, and who reads them."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import wsync
from wsync.bench.receiver import BareEngine
from wsync.deadline import Deadline
from wsync.errors import ConfigError, EngineStateError, TransportError
from wsync.plan import Bucket, Plan, TensorSpec
from wsync.protocols import Manifest
from wsync.pull import holders, ranks
from wsync.pull.exports import Export, Exporter, Share, Shares
from wsync.pull.sources import Sources
from wsync.pull.staging import Casts, Staging, plan_casts
from wsync.regions import Region
from wsync.replay import Step
from wsync.topology import CPU, Endpoint, local_endpoint
from wsync.views import Place

PULL = wsync.SyncConfig(path="pull", timeout_s=20.0)
HERE = local_endpoint("cpu")
ROWS, COLUMNS = 8, 6
FULL = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) / 7
UNIT = 256
LEFT, RIGHT = (Region.box((ROWS, COLUMNS), (0, first), (ROWS, 3)) for first in (0, 3))
WHOLE = Region.whole((ROWS, COLUMNS))


def on(device: str) -> Endpoint:
    return replace(HERE, device=device)


def bucket() -> Bucket:
    plan = Plan.pack([TensorSpec(name="w", shape=(ROWS, COLUMNS), dtype=torch.bfloat16)], 4096, {"w"})
    assert plan.pulled is not None
    return plan.pulled


def upper_and_lower() -> list[Shares]:
    """Of two ranks: rows in their order, and rows of which the memory is transposed."""
    upper, lower = FULL[:4].clone(), FULL[4:].t().contiguous()
    places = Region.whole((4, COLUMNS)), Region(0, (4, COLUMNS), (1, 4))
    found = []
    for rank, (memory, place) in enumerate(zip((upper, lower), places, strict=True)):
        elements = Region.box((ROWS, COLUMNS), (4 * rank, 0), (4, COLUMNS))
        part = Share(tensor=0, elements=elements, place=Place(memory=0, dtype=torch.float32, region=place))
        found.append(Shares(memories=[memory], parts=(part,)))
    return found


def exports_of(shares: Sequence[Shares], devices: Sequence[str] = ("a", "b")) -> list[Export]:
    pairs = enumerate(zip(shares, devices, strict=True))
    return [replace(Exporter(rank, CPU).export(one), endpoint=on(device)) for rank, (one, device) in pairs]


def worker(device: str, use: Region = WHOLE, dtype: torch.dtype = torch.bfloat16) -> Manifest:
    return Manifest(
        dtypes={"w": dtype},
        uses={"w": (use,)},
        problems=(),
        replayed=1,
        through_loader={},
        verified="yes",
        endpoint=on(device),
    )


def casts(workers: Sequence[Manifest], limit_bytes: int = 1 << 20) -> list[Casts]:
    exports = exports_of(upper_and_lower())
    return [plan_casts(bucket(), exports, rank, workers, limit_bytes) for rank in (0, 1)]


def test_what_crosses_in_fewer_bytes_is_cast() -> None:
    upper, lower = casts([worker("a", LEFT), worker("b", RIGHT)])
    assert [share.elements.numel for share in (*upper.staged, *lower.staged)] == [12, 12]
    assert upper.staged[0].elements.bounds == (3, 24), "rank 0 has the rows, the other worker the columns"
    assert upper.nbytes == upper.wanted_nbytes == UNIT
    assert upper.staged[0].place.memory == 1, "after the rank's own"


def test_what_does_not_cross_or_shrink_is_not() -> None:
    assert [one.staged for one in casts([worker("a", dtype=torch.float32)])] == [(), ()]
    upper, lower = casts([worker("a")])
    assert upper.staged == (), "its own device has these rows"
    assert len(lower.staged) == 1
    exports = exports_of(upper_and_lower(), devices=("a", "a"))
    assert plan_casts(bucket(), exports, 1, [worker("a")], UNIT) == Casts(of=exports[1].parts)


def test_a_replica_that_is_nearer_is_read_instead() -> None:
    upper, lower = upper_and_lower()
    exports = exports_of([upper, lower, lower], devices=("a", "b", "a"))
    assert [len(plan_casts(bucket(), exports, rank, [worker("a")], UNIT).staged) for rank in range(3)] == [0, 0, 0]
    assert [len(plan_casts(bucket(), exports, rank, [worker("b")], UNIT).staged) for rank in range(3)] == [1, 0, 0]


def test_workers_that_read_alike_share_a_copy() -> None:
    one, other = worker("c", LEFT), worker("d", LEFT)
    upper, _ = casts([one, other])
    assert len(upper.staged) == 1
    upper, _ = casts([one, worker("d", LEFT, torch.float16)])
    assert {share.place.dtype for share in upper.staged} == {torch.bfloat16, torch.float16}
    upper, _ = casts([one, worker("d", RIGHT)])
    assert len({share.elements for share in upper.staged}) == 2


def test_a_limit_leaves_parts_as_they_are() -> None:
    workers = [worker("c", LEFT), worker("d", RIGHT)]
    upper, _ = casts(workers, limit_bytes=2 * UNIT - 1)
    assert (len(upper.staged), upper.nbytes, upper.wanted_nbytes) == (1, UNIT, 2 * UNIT)
    assert casts(workers, limit_bytes=0)[0].staged == ()
    with pytest.raises(ConfigError, match="staging_bytes is -1"):
        wsync.SyncConfig(staging_bytes=-1)


def read(use: Region, dtype: torch.dtype, staged: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, int]:
    """What a worker on another device than both ranks finds, and how many bytes it read."""
    shares = upper_and_lower()
    exports = exports_of(shares)
    filled = [
        Staging(plan_casts(bucket(), exports, rank, [worker("c", use, staged)], 1 << 20)).fill(one)
        for rank, one in enumerate(shares)
    ]
    exports = exports_of(filled)
    step = Step(tensor=0, src=use, target="w", dst=Region.whole(use.sizes))
    found = torch.zeros(use.sizes, dtype=dtype)
    sources = Sources(bucket(), [step], {"w": dtype}, exports, HERE)
    return found, sources.read_into({"w": found})


@pytest.mark.parametrize("use", [WHOLE, LEFT, RIGHT], ids=["whole", "left", "right"])
def test_what_was_cast_is_read_from_any_memory(use: Region) -> None:
    found, nbytes = read(use, torch.bfloat16)
    expected = FULL.as_strided(use.sizes, use.strides, use.offset).to(torch.bfloat16)
    assert torch.equal(found, expected)
    assert nbytes == use.numel * 2


def test_what_was_cast_to_another_dtype_is_not_read() -> None:
    found, nbytes = read(WHOLE, torch.float16)
    assert torch.equal(found, FULL.to(torch.float16))
    assert nbytes == WHOLE.numel * 4


def test_a_part_of_what_was_cast_is_read_there() -> None:
    shares = upper_and_lower()
    exports = exports_of(shares)
    filled = Staging(plan_casts(bucket(), exports, 0, [worker("c")], 1 << 20)).fill(shares[0])
    found = torch.zeros(4, 3, dtype=torch.bfloat16)
    use = Region.box((ROWS, COLUMNS), (0, 3), (4, 3))
    step = Step(tensor=0, src=use, target="w", dst=Region.whole((4, 3)))
    sources = Sources(bucket(), [step], {"w": torch.bfloat16}, exports_of([filled, shares[1]]), HERE)
    assert sources.read_into({"w": found}) == 12 * 2
    assert torch.equal(found, FULL[:4, 3:].to(torch.bfloat16))


def test_other_shares_than_were_planned_are_not_cast() -> None:
    shares = upper_and_lower()
    staging = Staging(plan_casts(bucket(), exports_of(shares), 0, [worker("c")], 1 << 20))
    assert staging.fill(shares[1]) is shares[1]
    assert staging.held_bytes == 0


@pytest.fixture
def over_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker is behind a link."""
    monkeypatch.setattr(holders, "crosses_link", lambda owner, reader: True)


class Linear(nn.Linear):
    """Two tensors, of 32 and 4 elements."""

    def __init__(self) -> None:
        super().__init__(8, 4)


def engine_for(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> BareEngine:
    return BareEngine({name: torch.zeros_like(p, dtype=dtype) for name, p in module.named_parameters()})


def has(engine: BareEngine, actor: nn.Module) -> bool:
    return all(torch.equal(engine.tensors[n], p.to(engine.tensors[n].dtype)) for n, p in actor.named_parameters())


@pytest.mark.usefixtures("over_link")
def test_a_session_keeps_the_memory_and_gives_it_back() -> None:
    actor = Linear()
    engine = engine_for(actor)
    with wsync.connect(actor, engine, config=PULL) as session:
        assert "cast here before workers read it over a link: 512 bytes\n" in session.explain() + "\n"
        for _ in range(2):
            assert session.slot_bytes == 512
            for _ in range(2):
                with torch.no_grad():
                    actor.weight.add_(0.1)
                report = session.sync()
                assert has(engine, actor)
                assert (report.pulled_nbytes, report.peak_bytes, session.slot_bytes) == (36 * 2, 512, 0)
                assert 0 < report.stages["cast"] < report.seconds
                assert report.stages["open"] > 0
            session.release_slots()
        session.sync()
        assert session.slot_bytes == 0
    assert session.slot_bytes == 512


@pytest.mark.usefixtures("over_link")
def test_engines_pause_while_casts_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Linear()
    engine = engine_for(actor)
    done: list[str] = []

    def noting(kind: type, name: str, word: str) -> None:
        healthy = getattr(kind, name)

        def call(self: object, *args: Any, **kwargs: Any) -> Any:
            done.append(word)
            return healthy(self, *args, **kwargs)

        monkeypatch.setattr(kind, name, call)

    noting(Staging, "fill", "casts begin")
    noting(type(engine), "on_pause", "paused")
    monkeypatch.setattr(ranks, "wait_for", lambda *args: done.append("waited"))
    with wsync.connect(actor, engine, config=PULL) as session:
        report = session.sync()
    assert done == ["waited", "casts begin", "paused", "waited"]
    assert 0 < report.pause_seconds < report.seconds


@pytest.mark.usefixtures("over_link")
@pytest.mark.parametrize(("limit_bytes", "nbytes"), [(0, 36 * 4), (511, 32 * 2 + 4 * 4)])
def test_a_session_with_less_memory(limit_bytes: int, nbytes: int) -> None:
    actor = Linear()
    engine = engine_for(actor)
    with wsync.connect(actor, engine, config=replace(PULL, staging_bytes=limit_bytes)) as session:
        assert ("256 bytes of 512, as staging_bytes allows" in session.explain()) is (limit_bytes > 0)
        report = session.sync()
        assert has(engine, actor)
        assert (report.pulled_nbytes, report.peak_bytes) == (nbytes, limit_bytes // UNIT * UNIT)
        assert ("cast" in report.stages) is (limit_bytes > 0)


def test_nothing_crosses_a_link_in_host_memory() -> None:
    actor = Linear()
    with wsync.connect(actor, engine_for(actor), config=PULL) as session:
        assert "before workers read it" not in session.explain()
        report = session.sync()
        assert (report.pulled_nbytes, report.peak_bytes) == (36 * 4, 0)


@pytest.mark.usefixtures("over_link")
def test_two_engines_of_different_dtypes() -> None:
    actor = Linear()
    narrow, wide = engine_for(actor), engine_for(actor, torch.float32)
    report = wsync.sync(actor, [narrow, wide], config=PULL)
    assert has(narrow, actor)
    assert has(wide, actor)
    assert report.pulled_nbytes == 36 * (2 + 4)


@pytest.mark.usefixtures("over_link")
def test_without_memory_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Linear()
    engine = engine_for(actor)
    with wsync.connect(actor, engine, config=PULL) as session:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", full)
            with pytest.raises(TransportError, match=r"512 bytes on cpu, .* lower staging_bytes"):
                session.sync()
        assert engine.version() == 0
        session.sync()
        assert has(engine, actor)


def full(*sizes: object, **options: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.usefixtures("over_link")
def test_a_stalled_worker_never_reads_what_a_later_attempt_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attempt casts before every worker has answered the last one; and who wakes up late publishes nothing."""
    actor = Linear()
    engine = engine_for(actor)
    stalled, go_on = threading.Event(), threading.Event()
    read_into = Sources.read_into

    def stall(self: Sources, targets: Mapping[str, torch.Tensor]) -> int:
        stalled.set()
        assert go_on.wait(20.0)
        return read_into(self, targets)

    with wsync.connect(actor, engine, config=replace(PULL, timeout_s=0.5)) as session:
        session.sync()
        staging = session._staging
        assert staging._memory is not None
        with monkeypatch.context() as patch:
            patch.setattr(Sources, "read_into", stall)
            with pytest.raises(wsync.WsyncError):
                session.sync()
        assert stalled.is_set()
        cast = staging._memory.clone()
        with torch.no_grad():
            actor.weight.add_(1)
        with pytest.raises(EngineStateError, match="has not answered the previous sync yet"):
            session.sync()
        assert torch.equal(staging._memory, cast)
        go_on.set()
        assert engine._update is not None
        engine._update.result(Deadline.after(20.0))  # it read what its own attempt cast
        with pytest.raises(EngineStateError, match="no consistent version"):
            engine.version()
        session.sync()
        assert has(engine, actor)
