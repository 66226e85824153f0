"""Replaying a load plan gives, bit for bit, what the loader itself gives."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.toy_loader import Place, ToyLoader, checkpoint, specs_of
from wsync.errors import MismatchError, PeerError, ProtocolError
from wsync.plan import Bucket, Plan, TensorMeta
from wsync.record import record, writable
from wsync.replay import Replay, Routine, _flat
from wsync.verify import check_launch_weights


class Editing(ToyLoader):
    """Adds one to the norm in the caller's tensor, as Gemma's loader does; scales the down projection."""

    def places(self) -> dict[str, Place]:
        def norm(weight: torch.Tensor) -> None:
            weight += 1.0
            self.direct(self.model.norm, weight)

        def down(weight: torch.Tensor) -> None:
            self.columns(self.model.down, torch.exp(weight))

        return {**super().places(), "norm.weight": norm, "mlp.down.weight": down}


class Collecting(Editing):
    """Takes all of its input before it loads any of it."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(list(weights))


class Finishing(ToyLoader):
    """Changes a parameter behind the last tensor, from its live value."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_weights(weights)
        self.model.norm.data.copy_(torch.exp(self.model.norm.data))


class Transposing(ToyLoader):
    """Keeps one parameter transposed, and zeroes a row that its checkpoint has."""

    def places(self) -> dict[str, Place]:
        def embed(weight: torch.Tensor) -> None:
            self.embed(weight)
            self.model.embed.data[0].fill_(0.25)

        def up(weight: torch.Tensor) -> None:
            rows = self.model.gate_up.shape[0] // 2
            shard = weight.narrow(0, self.rank * rows, rows)
            self.model.gate_up.data[rows:].flatten().view(12, rows).t().copy_(shard)

        return {**super().places(), "embed.weight": embed, "mlp.up.weight": up}


def arrivals(
    plan: Plan, weights: Mapping[str, torch.Tensor], poison: bool = True
) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
    """Buckets as a receiver gives them: views into one slot, which is overwritten as soon as it is released."""
    slot = torch.empty(plan.capacity, dtype=torch.uint8)
    for bucket in plan.buckets:
        slot.random_(0, 256)
        for meta, view in bucket.views(slot):
            view.copy_(_part(weights[meta.name].to(meta.dtype), meta))
        yield bucket, [view for _, view in bucket.views(slot)]
        if poison:
            slot.random_(0, 256)


def _part(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    return tensor if meta.is_whole else meta.elements.view(tensor.reshape(-1))


def replay(
    loader: ToyLoader, weights: Mapping[str, torch.Tensor], bucket_bytes: int, wire: torch.dtype | None = None
) -> Plan:
    specs = [replace(spec, dtype=wire or spec.dtype) for spec in specs_of(weights)]
    plan = Plan.pack(specs, bucket_bytes)
    routine = Routine.compile(record(loader, plan.specs), plan)
    with writable(loader.targets()):
        Replay(routine, loader.targets()).run(arrivals(plan, weights), loader.load_weights, lambda: None)
    return plan


def assert_equal(one: ToyLoader, other: ToyLoader) -> None:
    for name, tensor in one.targets().items():
        bits = torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32
        assert torch.equal(tensor.view(bits), other.targets()[name].view(bits)), name


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from([ToyLoader, Editing, Collecting, Finishing, Transposing]),
    layout=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    bucket_bytes=st.integers(1, 12).map(lambda n: 256 * n + n),
    dtypes=st.sampled_from(
        [
            (torch.float32, torch.float32, torch.float32),
            (torch.float32, torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.bfloat16, torch.float32),
            (torch.float32, torch.bfloat16, torch.float32),
        ]
    ),
    seed=st.integers(0, 2**16),
)
def test_replay_equals_the_loader_for_any_bucket_size(
    kind: type[ToyLoader],
    layout: tuple[int, int],
    bucket_bytes: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    seed: int,
) -> None:
    held, wire, live = dtypes
    weights = checkpoint(seed, held)
    loader = kind(*layout, live)
    direct = copy.deepcopy(loader)
    with writable(direct.targets()):
        direct.load_weights((name, tensor.to(wire).clone()) for name, tensor in weights.items())
    replay(loader, weights, bucket_bytes, wire)
    assert_equal(loader, direct)


def test_tensors_larger_than_a_bucket_are_cut_and_never_assembled() -> None:
    weights = checkpoint(3)
    plan = Plan.pack(specs_of(weights), 256)
    assert sum(not meta.is_whole for bucket in plan.buckets for meta in bucket.tensors) == 19
    loader = ToyLoader(1, 2)
    routine = Routine.compile(record(loader, plan.specs), plan)
    run = Replay(routine, loader.targets())
    run.run(arrivals(plan, weights), loader.load_weights, lambda: None)
    steps = [step for steps in routine.steps for step in steps if step.target == "down"]
    assert sum(step.dst.numel for step in steps) == loader.model.down.numel()
    assert max(step.dst.numel for step in steps) <= 64


def test_tensors_by_reference_may_be_strided_and_in_the_trainers_dtype() -> None:
    weights = {name: tensor.double() for name, tensor in checkpoint(4).items()}
    weights["attn.o.weight"] = weights["attn.o.weight"].t().contiguous().t()
    loader, direct = Editing(dtype=torch.float32), Editing(dtype=torch.float32)
    direct.model.load_state_dict(loader.model.state_dict())
    specs = [replace(spec, dtype=torch.bfloat16) for spec in specs_of(weights)]
    plan = Plan.pack(specs, 1 << 20)
    direct.load_weights((name, tensor.bfloat16()) for name, tensor in weights.items())
    before = {name: tensor.clone() for name, tensor in weights.items()}
    routine = Routine.compile(record(loader, plan.specs), plan)
    given = [(bucket, [weights[meta.name] for meta in bucket.tensors]) for bucket in plan.buckets]
    Replay(routine, loader.targets()).run(given, loader.load_weights, lambda: None)
    for name, tensor in direct.model.named_parameters():
        assert torch.equal(tensor, loader.targets()[name]), name
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())


def test_one_cast_at_a_time_however_large_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither end has the wire dtype each tensor is rounded to it first."""
    weights, alive, most = checkpoint(4), list[weakref.ref[torch.Tensor]](), list[int]()

    def flat(tensor: torch.Tensor, meta: TensorMeta, target: torch.dtype) -> torch.Tensor:
        most.append(sum(one() is not None for one in alive))
        made = _flat(tensor, meta, target)
        alive.append(weakref.ref(made))
        return made

    loader = ToyLoader()
    plan = Plan.pack([replace(spec, dtype=torch.bfloat16) for spec in specs_of(weights)], 1 << 20)
    assert len(plan.buckets) == 1
    routine = Routine.compile(record(loader, plan.specs), plan)
    given = [(bucket, [weights[meta.name] for meta in bucket.tensors]) for bucket in plan.buckets]
    monkeypatch.setattr("wsync.replay._flat", flat)
    Replay(routine, loader.targets()).run(given, loader.load_weights, lambda: None)
    assert len(most) > 3
    assert max(most) <= 1


def test_moved_targets_are_found_again_and_reshaped_ones_refused() -> None:
    weights, loader = checkpoint(5), ToyLoader()
    plan = Plan.pack(specs_of(weights), 4096)
    routine = Routine.compile(record(loader, plan.specs), plan)
    loader.model.norm = torch.nn.Parameter(torch.randn(12), requires_grad=False)
    run = Replay(routine, loader.targets())
    run.run(arrivals(plan, weights), loader.load_weights, lambda: None)
    assert torch.equal(loader.model.norm, weights["norm.weight"])
    loader.model.norm = torch.nn.Parameter(torch.randn(13), requires_grad=False)
    with pytest.raises(MismatchError, match=r"norm \(torch.float32 \[12\].*now torch.float32 \[13\]"):
        Replay(routine, loader.targets())


def test_a_plan_for_other_dtypes_is_refused() -> None:
    loader = ToyLoader()
    load = record(loader, specs_of(checkpoint(6)))
    with pytest.raises(MismatchError, match="describe them first"):
        Routine.compile(load, Plan.pack(specs_of(checkpoint(6, torch.bfloat16)), 4096))


def _interrupted(plan: Plan, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
    stream = arrivals(plan, weights)
    yield next(stream)
    raise PeerError("the sender is gone")


@pytest.mark.parametrize("kind", [ToyLoader, Editing, Collecting])
def test_the_error_of_the_wire_comes_out_as_it_is(kind: type[ToyLoader]) -> None:
    weights, loader = checkpoint(7), kind()
    plan = Plan.pack(specs_of(weights), 1024)
    run = Replay(Routine.compile(record(loader, plan.specs), plan), loader.targets())
    written: list[int] = []
    with pytest.raises(PeerError, match="the sender is gone"):
        run.run(_interrupted(plan, weights), _wrapping(loader.load_weights), lambda: written.append(1))
    assert written == [1]


def _wrapping(
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], None],
) -> Callable[[Iterable[tuple[str, torch.Tensor]]], None]:
    def wrapped(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        try:
            load(weights)
        except Exception as error:
            raise RuntimeError("loading failed") from error

    return wrapped


def test_a_loader_that_stops_early_is_found() -> None:
    weights, loader = checkpoint(8), Editing()
    plan = Plan.pack(specs_of(weights), 1 << 20)
    run = Replay(Routine.compile(record(loader, plan.specs), plan), loader.targets())
    with pytest.raises(ProtocolError, match=r"it left mlp.down.weight, norm.weight"):
        run.run(arrivals(plan, weights), lambda weights: None, lambda: None)


@pytest.mark.parametrize("fails", [False, True])
def test_no_view_of_a_bucket_outlives_its_turn(fails: bool) -> None:
    weights, loader = checkpoint(12), Editing()
    plan = Plan.pack(specs_of(weights), 1024)
    given: list[weakref.ref[torch.Tensor]] = []

    def noted() -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        for bucket, views in arrivals(plan, weights):
            tensors = [view.clone() for view in views]
            given.extend(weakref.ref(tensor) for tensor in tensors)
            if fails and bucket.index == 3:
                raise PeerError("the sender is gone")
            yield bucket, tensors
            del tensors
            assert [ref() for ref in given] == [None] * len(given)

    load = record(loader, plan.specs)
    gc.disable()
    try:
        run = Replay(Routine.compile(load, plan), loader.targets())
        dead = weakref.ref(run)
        try:
            run.run(noted(), loader.load_weights, lambda: None)
        except PeerError:
            assert fails
        del run
        assert dead() is None
        assert [ref() for ref in given] == [None] * len(given)
    finally:
        gc.enable()


class Early(ToyLoader):
    """Writes before it takes its first tensor."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.model.norm.data.mul_(2.0)
        super().load_weights(weights)


def test_a_loader_that_writes_before_its_first_tensor_is_called_when_a_bucket_is_there() -> None:
    weights, loader = checkpoint(14), Early()
    plan = Plan.pack(specs_of(weights), 1024)
    load = record(loader, plan.specs)
    assert load.always_call
    before = loader.model.norm.clone()
    moments: list[str] = []

    def noted(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        moments.append("load")
        loader.load_weights(tensors)

    def gone() -> Iterator[tuple[Bucket, Sequence[torch.Tensor]]]:
        raise PeerError("the sender is gone")
        yield

    run = Replay(Routine.compile(load, plan), loader.targets())
    with pytest.raises(PeerError):
        run.run(gone(), noted, lambda: moments.append("write"))
    with pytest.raises(ProtocolError, match="0 buckets arrived"):
        run.run([], noted, lambda: moments.append("write"))
    assert moments == []
    assert torch.equal(loader.model.norm, before)
    run.run(arrivals(plan, weights), noted, lambda: moments.append("write"))
    assert moments == ["write", "load"]
    assert torch.equal(loader.model.norm, weights["norm.weight"])


def test_buckets_that_never_came_are_missed() -> None:
    weights, loader = checkpoint(13), ToyLoader()
    plan = Plan.pack(specs_of(weights), 1024)
    run = Replay(Routine.compile(record(loader, plan.specs), plan), loader.targets())
    some = (item for item in arrivals(plan, weights) if item[0].index < 2)
    with pytest.raises(ProtocolError, match=f"2 buckets arrived; the plan has {len(plan.buckets)}"):
        run.run(some, loader.load_weights, lambda: None)


# The check against the launch weights.


def launched(loader: ToyLoader, seed: int) -> ToyLoader:
    loader.launched = checkpoint(seed)
    loader.load_weights((name, tensor.clone()) for name, tensor in loader.launched.items())
    return loader


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_launch_weights_verify_a_plan(dtype: torch.dtype) -> None:
    loader = launched(ToyLoader(1, 2, dtype), 9)
    words, problems = check_launch_weights(loader, record(loader, specs_of(checkpoint(1))))
    assert (words, problems) == ("verified: 10 of 10 tensors against the launch weights", [])


def test_a_parameter_that_is_kept_in_another_layout_is_named() -> None:
    loader = launched(ToyLoader(), 10)
    loader.model.gate_up.data.copy_(loader.model.gate_up.data.flip(0))
    _, problems = check_launch_weights(loader, record(loader, specs_of(checkpoint(1))))
    assert len(problems) == 1
    assert problems[0].startswith("gate_up [40, 12]: its live bytes are not what the loader of toy 1.0 writes")
    assert "mlp.gate.weight, mlp.up.weight" in problems[0]


def test_a_nan_equals_itself_and_one_flipped_sign_does_not() -> None:
    loader = launched(ToyLoader(), 11)
    assert loader.launched is not None
    loader.launched["norm.weight"][3] = float("nan")
    loader.model.norm.data[3] = float("nan")
    loader.launched["norm.weight"][4] = 0.0
    loader.model.norm.data[4] = 0.0
    plan = record(loader, specs_of(checkpoint(1)))
    assert check_launch_weights(loader, plan)[1] == []
    loader.model.norm.data[4] = -0.0
    assert len(check_launch_weights(loader, plan)[1]) == 1


def test_without_a_checkpoint_the_plan_is_unverified() -> None:
    loader = ToyLoader()
    words, problems = check_launch_weights(loader, record(loader, specs_of(checkpoint(1))))
    assert words.startswith("unverified: ")
    assert problems == []


def test_a_plan_is_verified_only_if_every_copy_was_compared() -> None:
    loader = launched(ToyLoader(), 11)
    assert loader.launched is not None
    plan = record(loader, specs_of(checkpoint(1)))
    loader.launched["unknown"] = loader.launched.pop("norm.weight")
    words, problems = check_launch_weights(loader, plan)
    assert words == (
        "unverified: 9 of 10 tensors were compared with the launch weights; these are not among them: norm.weight"
    )
    assert problems == []
    loader.launched = {}
    assert check_launch_weights(loader, plan)[0].startswith("unverified: 0 of 10 tensors were compared")
    empty = replace(plan, writes=())
    assert check_launch_weights(loader, empty) == ("unverified: the plan copies no tensor", [])


def test_what_goes_through_the_loader_needs_no_proof() -> None:
    loader = launched(Editing(), 11)
    words, problems = check_launch_weights(loader, record(loader, specs_of(checkpoint(1))))
    assert (words, problems) == ("verified: 8 of 8 tensors against the launch weights", [])
