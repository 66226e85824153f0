"""What ranks and engines must agree on before a byte is moved, as pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from wsync import handshake
from wsync.adapters.trainers.module import ModuleProducer
from wsync.config import SyncConfig
from wsync.deadline import Deadline
from wsync.errors import ConfigError, MismatchError, ProtocolError, UnsupportedError
from wsync.group import Group
from wsync.handshake import _check_gathers, agree_in_place, merge_specs, negotiate
from wsync.plan import Bucket, Owner, Plan, TensorSpec
from wsync.protocols import Manifest
from wsync.regions import Region
from wsync.topology import Choice, Topology, local_endpoint
from wsync.transports.inproc import InprocTransport
from wsync.transports.shm import ShmTransport


def spec(name: str, rank: int, start: int, rows: int, *, dtype: torch.dtype = torch.float32) -> TensorSpec:
    """`rows` rows of a [4, 8] tensor, held by `rank`."""
    owner = Owner(rank=rank, region=Region.box((4, 8), (start, 0), (rows, 8)))
    return TensorSpec(name=name, shape=(4, 8), dtype=dtype, owners=(owner,))


def manifest(dtypes: Mapping[str, torch.dtype], **fields: object) -> Manifest:
    """A worker that reads all of every tensor in `dtypes`, unless `fields` say otherwise."""
    defaults = {
        "uses": {name: (Region.whole((4, 8)),) for name in dtypes},
        "problems": (),
        "replayed": len(dtypes),
        "through_loader": {},
        "verified": "yes",
        "endpoint": local_endpoint("cpu"),
    }
    return Manifest(dtypes=dtypes, **{**defaults, **fields})  # type: ignore[arg-type]


def one_engine(*workers: Manifest) -> Mapping[str, Sequence[Manifest]]:
    return {"replica": workers}


def test_owners_of_all_ranks_are_joined() -> None:
    (merged,) = merge_specs([[spec("w", 0, 0, 2)], [spec("w", 1, 2, 2)]])
    assert [owner.rank for owner in merged.owners] == [0, 1]


def test_a_part_that_no_rank_holds_is_an_error() -> None:
    with pytest.raises(MismatchError, match="no trainer rank holds some part of 'w'"):
        merge_specs([[spec("w", 0, 0, 2)], [spec("w", 1, 3, 1)]])


def test_ranks_with_different_tensors_are_told_which() -> None:
    with pytest.raises(MismatchError, match=r"ranks 0 and 1 hold different models: 1 against 2 tensors.*'extra'"):
        merge_specs([[spec("w", 0, 0, 4)], [spec("w", 1, 0, 4), spec("extra", 1, 0, 4)]])
    with pytest.raises(MismatchError, match="'w'"):
        merge_specs([[spec("w", 0, 0, 4)], [spec("w", 1, 0, 4, dtype=torch.bfloat16)]])


def test_the_engine_declares_the_wire_dtype_tensor_by_tensor() -> None:
    specs = [spec("w", 0, 0, 4), spec("bias", 0, 0, 4)]
    wanted = negotiate(specs, one_engine(manifest({"w": torch.bfloat16, "bias": torch.float32})), None)
    assert [w.dtype for w in wanted] == [torch.bfloat16, torch.float32]
    forced = negotiate(specs, one_engine(manifest({"w": torch.bfloat16, "bias": torch.float32})), torch.float16)
    assert [w.dtype for w in forced] == [torch.float16, torch.float16]


def test_two_engines_get_the_wider_dtype_so_that_each_rounds_once() -> None:
    replicas = {"a": [manifest({"w": torch.bfloat16})], "b": [manifest({"w": torch.float32})]}
    assert negotiate([spec("w", 0, 0, 4)], replicas, None)[0].dtype == torch.float32


def test_coverage_of_a_source_is_joined_over_the_workers_of_a_replica() -> None:
    top, bottom = (Region.box((4, 8), (start, 0), (2, 8)) for start in (0, 2))
    halves = [manifest({"w": torch.float32}, uses={"w": (part,)}) for part in (top, bottom)]
    assert negotiate([spec("w", 0, 0, 4)], one_engine(*halves), None)
    with pytest.raises(MismatchError, match=r"w \[4, 8\]: the engine's workers do not read all of it"):
        negotiate([spec("w", 0, 0, 4)], one_engine(*halves[:1]), None)


def test_an_engine_that_reads_a_part_is_not_excused_by_another_engine() -> None:
    narrow = manifest({"w": torch.float32}, uses={"w": (Region.box((4, 8), (0, 0), (2, 8)),)})
    with pytest.raises(MismatchError, match="do not read all of it"):
        negotiate([spec("w", 0, 0, 4)], {"a": [manifest({"w": torch.float32})], "b": [narrow]}, None)


def test_problems_of_all_workers_are_listed_once_with_a_count() -> None:
    problems = tuple(f"t{i}: unknown name" for i in range(7))
    workers = [manifest({"w": torch.float32}, problems=problems)] * 2
    with pytest.raises(MismatchError, match=r"7 place\(s\), nothing was changed: t0.*t4: unknown name and 2 more"):
        negotiate([spec("w", 0, 0, 4)], one_engine(*workers), None)


def test_an_optional_buffer_that_nobody_wants_stays_home() -> None:
    buffer = TensorSpec(name="inv_freq", shape=(4, 8), dtype=torch.float32, optional=True)
    specs = [spec("w", 0, 0, 4), buffer]
    plain, both = manifest({"w": torch.float32}), manifest({"w": torch.float32, "inv_freq": torch.float32})
    assert [s.name for s in negotiate(specs, one_engine(plain), None)] == ["w"]
    assert len(negotiate(specs, one_engine(both), None)) == 2
    assert len(negotiate(specs, {"a": [plain], "b": [both]}, None)) == 2, "one of two engines wants it"


def test_an_integer_tensor_is_not_rounded_to_float() -> None:
    with pytest.raises(MismatchError, match=r"w: the trainer holds torch.int32, the engine wants torch.float32"):
        negotiate([spec("w", 0, 0, 4, dtype=torch.int32)], one_engine(manifest({"w": torch.float32})), None)


class _OnDevice(ModuleProducer):
    """Says that its weights are on a GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("kind", "transport", "strided", "in_place"),
    [
        (_OnDevice, InprocTransport(), False, True),
        (_OnDevice, InprocTransport(), True, False),
        (_OnDevice, ShmTransport(), False, False),
        (ModuleProducer, InprocTransport(), False, False),
    ],
)
def test_tensors_that_are_read_in_place_on_a_device_make_one_bucket(
    kind: type[ModuleProducer], transport: InprocTransport | ShmTransport, strided: bool, in_place: bool
) -> None:
    module = nn.ParameterList([nn.Parameter(torch.randn(32, 32)) for _ in range(4)])
    if strided:
        module[2] = nn.Parameter(torch.randn(32, 64)[:, ::2])
    producer, here = kind(module), local_endpoint("cpu")
    choice = Choice(topology=Topology(sender=here, receivers=(here,)), transport=transport, rejected={})
    group, config = Group(0, 1, None, 5.0), SyncConfig(bucket_bytes=4096)
    plan, why = agree_in_place(producer, producer.metadata(), [choice], [0], group, config)
    assert (plan is not None) == (not why) == in_place
    if plan is not None:
        assert plan.in_place
        producer.open()
        assert [producer.references(bucket) is None for bucket in plan.buckets] == [False]


class _Beside(Group):
    """Hears of a rank 1 that introduces itself with `other`."""

    other: Mapping[str, object]

    def gather(self, phase: str, make: Callable[[], object], deadline: Deadline) -> list[object]:
        return [*super().gather(phase, make, deadline), self.other]


def test_parts_on_gpus_that_cannot_be_gathered_are_an_error_before_anything_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, upper, lower = spec("whole", 0, 0, 4), spec("apart", 0, 0, 2), spec("apart", 1, 2, 2)
    apart = replace(upper, owners=(*upper.owners, *lower.owners))
    plan = Plan.pack([whole, apart], 4096)
    group, gpu, patience = _Beside(0, 1, None, 5.0), torch.device("cuda", 0), Deadline.after(5)

    def check(plan: Plan, senders: Sequence[int], device: torch.device = gpu) -> None:
        _check_gathers(plan, senders, device, group, patience)

    # What nobody has to gather asks for no NCCL, which is not here.
    check(Plan.pack([whole], 4096), [0])
    check(Plan.pack([whole, apart], 4096, {"apart"}).sent, [0])
    for senders in ([0], [0, 1]):
        with pytest.raises(UnsupportedError, match=r"libnccl\.so\.2 cannot be used"):
            check(plan, senders)
    with pytest.raises(UnsupportedError, match="shards on cpu and on other ranks' CUDA devices"):
        check(plan, [0], torch.device("cpu"))
    mine = {"device": "uuid 0", "environment": {"NCCL's version": "2.28.9"}}
    monkeypatch.setattr(handshake, "introduce", lambda device: mine)
    group.other = mine
    with pytest.raises(ConfigError, match="ranks 0 and 1 have their shards on one device"):
        check(plan, [0])
    group.other = {**mine, "device": "uuid 1"}
    check(plan, [0])


class _Refuses(_OnDevice):
    def references(self, bucket: Bucket) -> Sequence[torch.Tensor] | None:
        raise MismatchError("what it refers to is gone")


def test_a_producer_that_cannot_refer_says_so_in_a_round_and_is_left_closed() -> None:
    module = nn.Linear(4, 4)
    producer, here = _Refuses(module), local_endpoint("cpu")
    choice = Choice(topology=Topology(sender=here, receivers=(here,)), transport=InprocTransport(), rejected={})
    group = _Counting(0, 1, None, 5.0)
    with pytest.raises(MismatchError, match="is gone"):
        agree_in_place(producer, producer.metadata(), [choice], [0], group, SyncConfig())
    assert group.said == ["refer"]
    with pytest.raises(ProtocolError):
        producer.stage(Plan.pack(producer.metadata(), 4096).buckets[0], None)


class _Counting(Group):
    """Remembers in which rounds an error was said."""

    said: list[str]

    def report(self, phase: str, error: BaseException) -> None:
        self.said = [*getattr(self, "said", []), phase]
        super().report(phase, error)
