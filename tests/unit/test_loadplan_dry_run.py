"""What a dry run finds out about loaders that behave, and that it never changes a live byte."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.unit.toy_loader import HIDDEN, KV_OUT, Place, ToyLoader, checkpoint, specs_of
from wsync.errors import EngineStateError, MismatchError
from wsync.loadplan import Copy, Cover, Fill, LoadPlan
from wsync.manifest import declared_dtypes, manifest
from wsync.plan import TensorSpec
from wsync.protocols import Manifest
from wsync.record import record
from wsync.regions import Region

WEIGHTS = checkpoint(1)


@contextmanager
def untouched(loader: ToyLoader) -> Iterator[None]:
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in loader.targets().items()}
    yield
    after = loader.targets()
    assert before.keys() == after.keys()
    assert all(after[name].data_ptr() == pointer for name, (pointer, _) in before.items())
    assert all(torch.equal(after[name], tensor) for name, (_, tensor) in before.items())


def dry(loader: ToyLoader, specs: Iterable[TensorSpec] | None = None) -> tuple[LoadPlan, Manifest]:
    with untouched(loader):
        plan = record(loader, list(specs if specs is not None else specs_of(WEIGHTS)))
    answer = manifest(
        plan,
        loader.targets(),
        loader.required(),
        engine=loader.engine,
        endpoint=loader.endpoint(),
        launch=("not checked", ()),
    )
    return plan, answer


def with_place(name: str, place: Callable[[ToyLoader, torch.Tensor], None]) -> ToyLoader:
    """A loader that does something else with one tensor."""

    class Odd(ToyLoader):
        def places(self) -> dict[str, Place]:
            return {**super().places(), name: lambda weight: place(self, weight)}

    return Odd()


@pytest.mark.parametrize(("rank", "tp"), [(0, 1), (0, 2), (1, 2)])
def test_every_tensor_of_a_fused_sliced_and_padded_model_is_replayed(rank: int, tp: int) -> None:
    plan, answer = dry(ToyLoader(rank, tp))
    assert answer.problems == ()
    assert answer.through_loader == {}
    assert answer.replayed == len(WEIGHTS)
    assert [copy.source for copy in plan.copies] == list(WEIGHTS)
    assert set(answer.dtypes.values()) == {torch.float32}


def test_copies_say_which_rows_go_where() -> None:
    plan, _ = dry(ToyLoader(rank=1, tp=2))
    shard = KV_OUT // 2
    k = next(copy for copy in plan.copies if copy.source == "attn.k.weight")
    assert k == Copy(
        source="attn.k.weight",
        src=Region(shard * HIDDEN, (shard * HIDDEN,), (1,)),
        target="qkv",
        dst=Region(4 * HIDDEN, (shard * HIDDEN,), (1,)),
    )


def test_padding_is_a_fill() -> None:
    plan, _ = dry(ToyLoader())
    fills = [write for write in plan.writes if isinstance(write, Fill)]
    assert [(fill.target, fill.value, fill.source, fill.dst.bounds) for fill in fills] == [
        ("embed", 0, "embed.weight", (11 * HIDDEN, 16 * HIDDEN))
    ]


def test_sources_are_used_up_by_both_ranks_together() -> None:
    halves = [dry(ToyLoader(rank, 2))[1].uses["mlp.down.weight"] for rank in range(2)]
    assert [part.numel for part in (*halves[0], *halves[1])] == [120, 120]
    assert not halves[0][0].intersect(halves[1][0])


def test_an_oversized_input_that_is_narrowed_in_silence_shows_in_its_use() -> None:
    specs = [replace(s, shape=(12, 30)) if s.name == "mlp.down.weight" else s for s in specs_of(WEIGHTS)]
    _, answer = dry(ToyLoader(), specs)
    assert sum(part.numel for part in answer.uses["mlp.down.weight"]) == 12 * 20


def test_a_missing_k_is_found_as_rows_of_the_fused_parameter() -> None:
    _, answer = dry(ToyLoader(), [spec for spec in specs_of(WEIGHTS) if spec.name != "attn.k.weight"])
    assert answer.problems == ("qkv (16x12): rows 8-11 are written by no tensor; it gets attn.q.weight, attn.v.weight",)


def test_a_parameter_that_nothing_writes_is_named() -> None:
    _, answer = dry(ToyLoader(), [spec for spec in specs_of(WEIGHTS) if spec.name != "norm.weight"])
    assert answer.problems == ("norm (12): no tensor is written to it",)


def test_unknown_names_and_wrong_shapes_are_all_listed() -> None:
    specs = [
        TensorSpec(name="lm_head.scales", shape=(3,), dtype=torch.float32),
        *(replace(spec, shape=(9, 12)) if spec.name == "attn.q.weight" else spec for spec in specs_of(WEIGHTS)),
        TensorSpec(name="visual.weight", shape=(3,), dtype=torch.float32),
        TensorSpec(name="norm.weight.extra", shape=(3,), dtype=torch.float32),
    ]
    specs = [replace(spec, shape=(13,)) if spec.name == "norm.weight" else spec for spec in specs]
    _, answer = dry(ToyLoader(), specs)
    words = "\n".join(answer.problems)
    for name in ("lm_head.scales", "visual.weight", "norm.weight.extra", "norm.weight"):
        assert f"{name}: toy 1.0 refuses it (" in words
    assert "norm (12): no tensor is written to it" in words
    assert "attn.q.weight" not in answer.problems[0]
    assert "attn.q.weight" not in {p.split(":")[0] for p in answer.problems}, "its narrowing fits; its use tells"
    assert sum(part.numel for part in answer.uses["attn.q.weight"]) == 8 * 12


def test_a_name_that_is_ignored_in_silence_is_a_problem() -> None:
    class Forgiving(ToyLoader):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights((n, w) for n, w in weights if n in self.places())

    specs = [*specs_of(WEIGHTS), TensorSpec(name="rotary.inv_freq", shape=(3,), dtype=torch.float32)]
    _, answer = dry(Forgiving(), specs)
    assert answer.problems == ("rotary.inv_freq: toy 1.0 ignores it: it is written to no parameter or buffer",)
    _, answer = dry(Forgiving(), [*specs[:-1], replace(specs[-1], optional=True)])
    assert answer.problems == ()
    assert "rotary.inv_freq" not in answer.dtypes


def test_a_buffer_that_the_engine_wants_is_taken() -> None:
    class Wants(ToyLoader):
        def accepts(self, name: str) -> bool:
            return name == "cache"

        def places(self) -> dict[str, Place]:
            return {**super().places(), "cache": lambda w: self.direct(self.targets()["cache"], w)}

    optional = [TensorSpec(name=name, shape=(5,), dtype=torch.float32, optional=True) for name in ("cache", "other")]
    plan, answer = dry(Wants(), [*specs_of(WEIGHTS), *optional])
    assert answer.problems == ()
    assert "cache" in answer.dtypes
    assert "other" not in answer.dtypes
    assert plan.copies[-1].target == "cache"


def test_tied_parameters_count_once() -> None:
    class Tied(ToyLoader):
        def __init__(self) -> None:
            super().__init__()
            self.model.register_parameter("head", self.model.embed)

    _, answer = dry(Tied())
    assert answer.problems == ()
    _, answer = dry(Tied(), [spec for spec in specs_of(WEIGHTS) if spec.name != "embed.weight"])
    assert answer.problems == ("embed (16x12): no tensor is written to it",)


def test_the_wire_dtype_is_that_of_the_parameter() -> None:
    loader = ToyLoader(dtype=torch.bfloat16)
    loader.model.norm.data = loader.model.norm.data.float()
    plan, answer = dry(loader)
    assert answer.problems == ()
    assert declared_dtypes(plan)["norm.weight"] == torch.float32
    assert declared_dtypes(plan)["attn.k.weight"] == torch.bfloat16


def test_a_quantised_parameter_refuses_a_plain_cast() -> None:
    loader = ToyLoader()
    loader.model.o = torch.nn.Parameter(torch.randint(-9, 9, (12, 8), dtype=torch.int8), requires_grad=False)
    loader.model.down = torch.nn.Parameter(loader.model.down.to(torch.float8_e4m3fn), requires_grad=False)
    _, answer = dry(loader)
    assert len(answer.problems) == 2
    assert "attn.o.weight: toy 1.0 keeps it as torch.int8" in answer.problems[0]
    assert "without its scales" in answer.problems[1]


def test_inference_tensors_can_be_recorded() -> None:
    with torch.inference_mode():
        loader = ToyLoader()
    assert loader.model.norm.is_inference()
    _, answer = dry(loader)
    assert answer.problems == ()


# Loaders that do more than copy.


def test_an_input_edited_in_place_goes_through_the_loader() -> None:
    def plus_one(loader: ToyLoader, weight: torch.Tensor) -> None:
        weight += 1.0
        loader.direct(loader.model.norm, weight)

    plan, answer = dry(with_place("norm.weight", plus_one))
    assert answer.problems == ()
    assert answer.through_loader == {"norm.weight": "the loader edits it in place"}
    assert next(write for write in plan.writes if isinstance(write, Cover)).target == "norm"


@pytest.mark.parametrize(
    "derive",
    [
        lambda w: -torch.exp(w.float()),
        lambda w: w.double(),
        lambda w: torch.cat([w[6:], w[:6]]),
        lambda w: w[torch.arange(11, -1, -1)],
        lambda w: torch.zeros(12).copy_(w),
        lambda w: torch.ones(12) * w,
        lambda w: w.expand(3, 12).sum(0),
    ],
)
def test_a_derived_value_goes_through_the_loader_and_still_covers(
    derive: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    loader = with_place("norm.weight", lambda self, w: self.direct(self.model.norm, derive(w)))
    _, answer = dry(loader)
    assert answer.problems == ()
    assert list(answer.through_loader) == ["norm.weight"]
    assert answer.through_loader["norm.weight"].startswith("the loader computes norm from it")


@pytest.mark.parametrize(
    "same",
    [
        lambda w: w.to("cpu"),
        lambda w: w.cpu().contiguous(),
        lambda w: w.clone(),
        lambda w: w.detach()[None].squeeze(0).reshape(3, 4).flatten(),
        lambda w: w.view(2, 6).reshape(12),
    ],
)
def test_values_that_only_move_are_still_copies(same: Callable[[torch.Tensor], torch.Tensor]) -> None:
    _, answer = dry(with_place("norm.weight", lambda self, w: self.direct(self.model.norm, same(w))))
    assert answer.problems == ()
    assert answer.through_loader == {}


def test_a_transposed_parameter_and_a_transposed_contiguous_source_are_copies() -> None:
    def transposed(loader: ToyLoader, weight: torch.Tensor) -> None:
        loader.model.o.data.t().copy_(weight.t().contiguous())

    plan, answer = dry(with_place("attn.o.weight", transposed))
    assert answer.problems == ()
    assert answer.through_loader == {}
    o = next(copy for copy in plan.copies if copy.target == "o")
    assert (o.src, o.dst) == (Region.span(0, 96).coalesce(), Region.span(0, 96).coalesce())


@pytest.mark.parametrize(
    "look",
    [
        lambda w: w.sum().item(),
        lambda w: w.tolist(),
        lambda w: w.numpy(),
        lambda w: bool(w[0] > 0),
        lambda w: torch.equal(w, w),
        lambda w: w[w > 0],
    ],
)
def test_a_loader_that_looks_at_values_is_not_followed_and_not_failed(look: Callable[[torch.Tensor], object]) -> None:
    def place(loader: ToyLoader, weight: torch.Tensor) -> None:
        look(weight)
        loader.direct(loader.model.norm, weight)

    plan, answer = dry(with_place("norm.weight", place))
    assert answer.problems == (), "norm has the size of the source, and nothing else writes it"
    assert list(answer.through_loader) == ["norm.weight"]
    assert plan.unfollowed == {"norm.weight"}
    assert answer.uses["norm.weight"] == (Region.span(0, 12),)


def test_a_part_that_only_an_unfollowed_source_could_write_is_reported_with_its_name() -> None:
    def place(loader: ToyLoader, weight: torch.Tensor) -> None:
        weight.sum().item()

    _, answer = dry(with_place("attn.k.weight", place))
    assert len(answer.problems) == 1
    assert answer.problems[0].startswith("qkv (16x12): rows 8-11 are written by no tensor")
    assert answer.problems[0].endswith("not followed: attn.k.weight")


def test_a_parameter_computed_from_its_live_value_takes_all_its_sources_through_the_loader() -> None:
    def place(loader: ToyLoader, weight: torch.Tensor) -> None:
        loader.rows(loader.model.qkv, 12, 4, weight)
        loader.model.qkv.data.copy_(torch.exp(loader.model.qkv.data))

    _, answer = dry(with_place("attn.v.weight", place))
    assert answer.problems == ()
    assert set(answer.through_loader) == {"attn.q.weight", "attn.k.weight", "attn.v.weight"}


def test_an_in_place_operator_on_a_live_tensor_is_swallowed() -> None:
    def place(loader: ToyLoader, weight: torch.Tensor) -> None:
        loader.direct(loader.model.norm, weight)
        loader.model.norm.data.mul_(2).add_(1)

    _, answer = dry(with_place("norm.weight", place))
    assert list(answer.through_loader) == ["norm.weight"]


def test_post_processing_behind_the_last_tensor_makes_the_loader_be_called() -> None:
    class Post(ToyLoader):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load_weights(weights)
            self.model.norm.data.copy_(torch.exp(self.model.norm.data))

    plan, answer = dry(Post())
    assert plan.always_call
    assert list(answer.through_loader) == ["norm.weight"]


def test_two_sources_for_one_place_go_through_the_loader_in_its_order() -> None:
    loader = with_place("mlp.up.weight", lambda self, w: self.rows(self.model.gate_up, 10, 20, w))
    _, answer = dry(loader)
    assert set(answer.through_loader) == {"mlp.gate.weight", "mlp.up.weight"}
    assert [p.split(":")[0] for p in answer.problems] == ["gate_up (40x12)"]


@pytest.mark.parametrize(("before", "last"), [(True, False), (False, True)])
def test_a_fill_that_overlaps_copies_keeps_its_side_of_them(before: bool, last: bool) -> None:
    def place(loader: ToyLoader, weight: torch.Tensor) -> None:
        rows = loader.model.embed.data
        if before:
            rows.zero_()
        rows[:11].copy_(weight)
        rows[11:].zero_()
        if not before:
            rows[0].fill_(0.5)

    plan, answer = dry(with_place("embed.weight", place))
    assert answer.problems == ()
    assert answer.through_loader == {}
    assert [fill.last for fill in plan.fills] == ([last, True] if before else [True, last])


def test_a_fill_between_two_copies_goes_through_the_loader() -> None:
    def place(loader: ToyLoader, weight: torch.Tensor) -> None:
        rows = loader.model.embed.data
        rows[:11].copy_(weight)
        rows.zero_()
        rows[5:].copy_(weight)

    _, answer = dry(with_place("embed.weight", place))
    assert list(answer.through_loader) == ["embed.weight"]


def test_a_loader_that_collects_its_input_first_is_followed() -> None:
    class Collecting(ToyLoader):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for name, weight in sorted(weights):
                self.places()[name](weight)

    _, answer = dry(Collecting())
    assert (answer.problems, answer.through_loader) == ((), {})
    extra = [TensorSpec(name=name, shape=(2,), dtype=torch.float32) for name in ("a", "n", "z")]
    _, answer = dry(Collecting(), [*specs_of(WEIGHTS), *extra])
    assert sorted(problem.split(":")[0] for problem in answer.problems) == ["a", "n", "z"]


@pytest.mark.parametrize("how", ["data", "attribute", "set_"])
def test_a_loader_that_rebinds_is_stopped_and_named(how: str) -> None:
    def place(loader: ToyLoader, weight: torch.Tensor) -> None:
        if how == "data":
            loader.model.norm.data = weight
        elif how == "attribute":
            loader.model.norm = torch.nn.Parameter(weight, requires_grad=False)
        else:
            loader.model.norm.data.set_(torch.zeros(12).untyped_storage())

    _, answer = dry(with_place("norm.weight", place))
    assert answer.problems[0].startswith("norm.weight: toy 1.0 puts other memory under the live tensor norm")


def test_a_loader_that_rebinds_behind_our_back_is_an_error() -> None:
    def place(loader: ToyLoader, weight: torch.Tensor) -> None:
        loader.model._parameters["norm"] = torch.nn.Parameter(torch.zeros(12), requires_grad=False)

    loader = with_place("norm.weight", place)
    with pytest.raises(EngineStateError, match="replaced live tensors during a dry run: norm"):
        record(loader, specs_of(WEIGHTS))


def test_parameters_on_meta_are_refused() -> None:
    loader = ToyLoader()
    loader.model.to("meta")
    with pytest.raises(MismatchError, match="parameters without memory"):
        record(loader, specs_of(WEIGHTS))
