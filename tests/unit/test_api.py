"""`sync`, `sync_async` and `connect` as a user calls them, in one process with small modules."""

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import wsync
from wsync import api
from wsync.adapters.engines.hf import HFEngine
from wsync.deadline import Deadline
from wsync.protocols import Engine, Manifest
from wsync.registry import engine_for, transport
from wsync.testing.chaos import ChaosTransport, Fault


class Net(nn.Module):
    """Weights of a few kinds, and just enough to be taken for a model that generates."""

    table: torch.Tensor

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.body = nn.Linear(32, 48, dtype=dtype)
        self.head = nn.Linear(48, 8, bias=False, dtype=dtype)
        self.register_buffer("table", torch.randn(16, generator=g), persistent=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=g))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self(x)
        return out


@pytest.fixture(autouse=True)
def no_sessions_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not api._sessions, "a session outlived its actor and engine"


def same(actor: nn.Module, engine: nn.Module) -> bool:
    return all(torch.equal(a, e) for a, e in zip(actor.parameters(), engine.parameters(), strict=True))


def test_sync_connects_once_and_counts_versions() -> None:
    actor, engine = Net(1), Net(2)
    for version in (1, 2, 3):
        with torch.no_grad():
            actor.head.weight.add_(1.0)
        report = wsync.sync(actor, engine)
        assert report.version == version
        assert same(actor, engine)
        assert torch.equal(actor.table, engine.table), "a buffer that no checkpoint has stayed behind"
        assert len(api._sessions) == 1


def test_the_report_prints_a_table_and_is_json() -> None:
    actor, engine = Net(1), Net(2)
    report = wsync.sync(actor, engine)
    assert str(report).startswith("wsync: version 1, 4 tensors")
    fields = json.loads(report.to_json())
    assert fields["nbytes"] == 4 * (32 * 48 + 48 + 48 * 8 + 16)
    assert fields["transport"] == "inproc"
    assert fields["gb_per_s"] > 0
    assert fields["peak_bytes"] == 0, "whole tensors in one process need no slot"
    assert report.control_seconds < report.seconds


def test_the_engine_declares_the_dtype_and_a_config_overrides_it() -> None:
    actor, engine = Net(1), Net(2, torch.bfloat16)
    report = wsync.sync(actor, engine)
    assert torch.equal(engine.head.weight, actor.head.weight.to(torch.bfloat16))
    wide = wsync.sync(actor, engine, config=wsync.SyncConfig(dtype=torch.float32))
    assert wide.nbytes > report.nbytes
    assert torch.equal(engine.head.weight, actor.head.weight.to(torch.bfloat16))


def test_another_config_is_another_session() -> None:
    actor, engine = Net(1), Net(2)
    wsync.sync(actor, engine)
    report = wsync.sync(actor, engine, config=wsync.SyncConfig(bucket_bytes=4096, verify="digest"))
    assert report.version == 2
    assert len(api._sessions) == 1


def test_a_session_keeps_neither_side_alive() -> None:
    actor, engine = Net(1), Net(2)
    wsync.sync(actor, engine)
    gone = weakref.ref(actor), weakref.ref(engine)
    del actor
    gc.collect()
    assert gone[0]() is None
    assert not api._sessions
    del engine
    gc.collect()
    assert gone[1]() is None


def test_on_a_running_loop_sync_names_sync_async_which_works() -> None:
    actor, engine = Net(1), Net(2)

    async def main() -> wsync.SyncReport:
        with pytest.raises(wsync.ConfigError, match=r"await wsync\.sync_async"):
            wsync.sync(actor, engine)
        return await wsync.sync_async(actor, engine)

    assert asyncio.run(main()).version == 1
    assert same(actor, engine)


def test_the_loop_goes_on_during_sync_async() -> None:
    actor, engine = Net(1), Net(2)
    release = threading.Event()
    held: Engine = engine_for(engine)
    begin = type(held).begin

    def slow(self: Engine, *args: object, **kwargs: object) -> None:
        assert release.wait(30), "the loop stood still"
        begin(self, *args, **kwargs)  # type: ignore[arg-type]

    async def main() -> None:
        task = asyncio.create_task(wsync.sync_async(actor, engine))
        await asyncio.to_thread(lambda: None)
        release.set()
        await task

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(held), "begin", slow)
        asyncio.run(main())
    assert same(actor, engine)


def test_an_unknown_engine_or_actor_is_told_what_is_supported() -> None:
    actor = Net(1)
    with pytest.raises(wsync.UnsupportedError, match=r"this engine is a builtins\.dict.*Supported: vllm.*hf"):
        wsync.sync(actor, {})
    with pytest.raises(wsync.UnsupportedError, match=r"this actor is a builtins\.int.*Supported: .*fsdp.*module"):
        wsync.sync(7, Net(2))
    with pytest.raises(wsync.UnsupportedError, match="there is no transport 'carrier pigeon'"):
        wsync.sync(actor, Net(2), config=wsync.SyncConfig(transport="carrier pigeon"))


def test_no_engine_anywhere_is_an_error() -> None:
    with pytest.raises(wsync.ConfigError, match="none of the 1 trainer rank"):
        wsync.sync(Net(1), None)


def test_a_version_must_grow() -> None:
    actor, engine = Net(1), Net(2)
    wsync.sync(actor, engine, version=7)
    with pytest.raises(wsync.ConfigError, match="version 7 is not newer than version 7"):
        wsync.sync(actor, engine, version=7)
    assert wsync.sync(actor, engine).version == 8


def test_several_engines_take_the_same_version() -> None:
    actor, first, second = Net(1), Net(2), Net(3, torch.bfloat16)
    wsync.sync(actor, first, version=5)
    report = wsync.sync(actor, [first, second])
    assert report.version == 6
    assert same(actor, first)
    assert torch.equal(second.head.weight, actor.head.weight.to(torch.bfloat16))
    assert torch.equal(first.head.weight, actor.head.weight), "the narrower engine narrowed the other one's weights"


def test_a_session_is_a_context_manager_and_explains_itself() -> None:
    actor, engine = Net(1), Net(2)
    with wsync.connect(actor, engine) as session:
        text = session.explain()
        session.sync()
    assert "inproc" in text
    assert "not shm" in text
    with pytest.raises(wsync.ClosedError):
        session.sync()
    session.close()


def test_what_goes_through_the_loader_is_explained_once_for_each_reason() -> None:
    reasons = {f"w{i}": "it is reloaded" for i in range(8)} | {"norm": "the loader edits it in place"}
    describe = HFEngine.describe

    def described(self: HFEngine, specs: Sequence[wsync.TensorSpec], deadline: Deadline) -> Sequence[Manifest]:
        return [replace(manifest, through_loader=reasons) for manifest in describe(self, specs, deadline)]

    actor, engine = Net(1), Net(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFEngine, "describe", described)
        with wsync.connect(actor, engine) as session:
            lines = session.explain().splitlines()
    at = lines.index("  8 tensor(s) through the engine's own loader (w0, w1, w2, w3, w4 and 3 more): it is reloaded")
    assert lines[at + 1] == "  1 tensor(s) through the engine's own loader (norm): the loader edits it in place"
    assert "tensors copied by plan (unverified: the engine was launched without a checkpoint" in lines[at - 1]


def test_the_report_says_what_the_slowest_worker_spent() -> None:
    actor, engines = Net(1), [Net(2), Net(3)]
    report = wsync.sync(actor, engines)
    mine = [name for name in report.stages if name.startswith("worker ")]
    assert mine == ["worker wait", "worker load", "worker finish"]
    assert 0 < report.stages["worker load"] < report.seconds
    assert 0 < report.stages["worker wait"] < report.seconds
    assert report.control_seconds <= sum(seconds for name, seconds in report.stages.items() if name not in mine)
    assert "  worker finish " in str(report)


def test_workers_are_given_a_plan_without_owners() -> None:
    actor, engine = Net(1), Net(2)
    attach, plans = HFEngine.attach, []

    def attached(self: HFEngine, plan: wsync.Plan, *args: Any) -> None:
        plans.append(plan)
        attach(self, plan, *args)

    with pytest.MonkeyPatch.context() as patch, wsync.connect(actor, engine) as session:
        patch.setattr(HFEngine, "attach", attached)
        session.sync()
    [plan] = plans
    assert plan.specs
    assert [spec.name for spec in plan.specs if spec.owners] == []


def test_two_syncs_at_once_of_one_session_are_refused() -> None:
    actor, engine = Net(1), Net(2)
    held: Engine = engine_for(engine)
    begin = type(held).begin
    with wsync.connect(actor, engine) as session, pytest.MonkeyPatch.context() as patch:

        def again(self: Engine, *args: object, **kwargs: object) -> None:
            with pytest.raises(wsync.ConfigError, match="a sync of this session is running"):
                session.sync()
            begin(self, *args, **kwargs)  # type: ignore[arg-type]

        patch.setattr(type(held), "begin", again)
        session.sync()
    assert same(actor, engine)


def test_two_actors_take_turns_on_one_engine() -> None:
    """Each has a session of its own; each sync leaves the weights of the actor that made it."""
    first, second, engine = Net(1), Net(2), Net(3)
    for version, actor in enumerate((first, second, first, first, second), start=1):
        assert wsync.sync(actor, engine).version == version
        assert same(actor, engine)


def test_closing_one_of_two_sessions_leaves_the_other_at_work() -> None:
    actor, other, engine = Net(1), Net(2), Net(3)
    with wsync.connect(actor, engine) as session:
        with wsync.connect(other, engine) as short:
            short.sync()
            session.sync()
        session.sync()
        assert same(actor, engine)


def test_an_actor_is_no_engine_of_itself() -> None:
    model = Net(1)
    with pytest.raises(wsync.ConfigError, match="actor and engine are the same object"):
        wsync.sync(model, model)


def test_wrong_kinds_of_arguments_are_named() -> None:
    settings: Any = {"verify": "digest"}
    with pytest.raises(wsync.ConfigError, match=r"config is a dict; pass a wsync\.SyncConfig"):
        wsync.sync(nn.Linear(2, 2), None, config=settings)
    name: Any = "bf16"
    with pytest.raises(wsync.ConfigError, match=r"dtype is 'bf16'; pass a dtype of torch"):
        wsync.SyncConfig(dtype=name)
    with pytest.raises(wsync.UnsupportedError, match=r"this engine is the class .*Linear \(pass an instance\)"):
        wsync.connect(nn.Linear(2, 2), nn.Linear)


def test_the_same_engine_twice_is_an_error() -> None:
    engine = Net(2)
    with pytest.raises(wsync.ConfigError, match="the same engine was passed twice"):
        wsync.connect(Net(1), [engine, engine])


def test_an_actor_that_changed_its_dtype_is_refused_once_and_then_taken() -> None:
    actor, engine = Net(1), Net(2)
    wsync.sync(actor, engine)
    actor.to(torch.bfloat16)
    with pytest.raises(wsync.MismatchError, match="no longer what they were at connect"):
        wsync.sync(actor, engine)
    assert wsync.sync(actor, engine).version == 2
    assert torch.equal(engine.head.weight, actor.head.weight.float())


def test_one_engine_that_fails_to_resume_strands_no_other() -> None:
    actor, first, second = Net(1), Net(2), Net(3)
    resume = HFEngine.on_resume
    fault = Fault(kind="raise", bucket=0)

    def broken(self: HFEngine, deadline: Deadline) -> None:
        if self is engine_for(first):
            raise wsync.PeerError("the engine core is gone")
        resume(self, deadline)

    config = wsync.SyncConfig(transport=ChaosTransport(transport("inproc"), fault))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFEngine, "on_resume", broken)
        with pytest.raises(wsync.TransportError, match="raised on purpose"):
            wsync.sync(actor, [first, second], config=config)
    wsync.sync(actor, [first, second])
    assert same(actor, first)
    assert same(actor, second)


def test_rank_and_world_size_come_together_and_with_a_store() -> None:
    with pytest.raises(wsync.ConfigError, match="rank and world_size together"):
        wsync.connect(Net(1), Net(2), rank=0)
    with pytest.raises(wsync.ConfigError, match="needs store="):
        wsync.connect(Net(1), Net(2), rank=0, world_size=2)
    with pytest.raises(wsync.ConfigError, match="rank 3 is not in a world of 2"):
        wsync.connect(Net(1), Net(2), rank=3, world_size=2)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("bucket_bytes", 100, "at least 4096 bytes"),
        ("num_slots", 0, "at least one slot"),
        ("timeout_s", 0.0, "positive number of seconds"),
        ("pause", "never", "abort, wait, keep"),
        ("verify", "hope", "digest"),
        ("dtype", torch.int32, "floating-point dtype"),
    ],
)
def test_a_wrong_setting_says_what_is_right(field: str, value: object, words: str) -> None:
    with pytest.raises(wsync.ConfigError, match=words):
        wsync.SyncConfig(**{field: value})  # type: ignore[arg-type]


def test_an_engine_that_changed_since_connect_is_taken_by_the_next_sync() -> None:
    actor, engine = Net(1), Net(2)
    wsync.sync(actor, engine)
    engine.to(torch.bfloat16)
    with pytest.raises(wsync.PeerError, match="parameters changed since the load plan was made"):
        wsync.sync(actor, engine)
    assert HFEngine(engine).version() == 1
    assert wsync.sync(actor, engine).version == 2
    assert torch.equal(engine.head.weight, actor.head.weight.to(torch.bfloat16))


def test_an_engine_whose_memory_was_freed_is_refused_before_a_byte_is_written() -> None:
    actor, engine = Net(1), Net(2)
    wsync.sync(actor, engine)
    engine.head.weight.untyped_storage().resize_(0)
    with pytest.raises(wsync.PeerError, match=r"memory of 1 parameter\(s\) of the engine was freed: .*head\.weight"):
        wsync.sync(actor, engine)
    assert HFEngine(engine).version() == 1
    engine.head.weight.untyped_storage().resize_(4 * engine.head.weight.numel())
    wsync.sync(actor, engine)
    assert same(actor, engine)


def test_an_engine_that_another_session_takes_in_the_middle_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, engine = Net(1), Net(3), Net(2)
    pause = HFEngine.on_pause
    with wsync.connect(first, engine) as one, wsync.connect(second, engine) as two:
        one.sync()

        def taken(self: HFEngine, mode: Any, deadline: Deadline) -> None:
            two._attach()
            pause(self, mode, deadline)

        with monkeypatch.context() as patch:
            patch.setattr(HFEngine, "on_pause", taken)
            with pytest.raises(wsync.EngineStateError, match="another session took the engine"):
                one.sync()
        assert HFEngine(engine).version() == 1, "the worker began to read from the other session's sender"
        assert same(first, engine)
        engine(torch.randn(1, 32))
        two.sync()
        assert same(second, engine)
        one.sync()
        assert same(first, engine)
