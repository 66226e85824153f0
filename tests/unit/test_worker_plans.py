"""A worker asked what it takes, and given a plan: dtypes, launch weights, optional tensors."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from tests.unit.toy_loader import Place, ToyLoader, checkpoint, specs_of
from tests.unit.worker_rig import TIMEOUT_S, Failed, Rig, assert_holds, rig
from wsync import registry
from wsync.deadline import Deadline
from wsync.plan import Plan
from wsync.protocols import Manifest, Ticket

TICKET = Ticket(transport="inproc", address="nowhere", secret=b"", generation=1)


def test_hello_and_describe() -> None:
    with rig() as r:
        hello = r.ask("hello")
        assert (hello["engine"], hello["version"], hello["state"]) == ("toy 1.0", 0, "serving")
        assert hello["endpoint"] == r.loader.endpoint()
        answer = r.ask("describe", specs=specs_of(checkpoint(1)))["manifest"]
        assert isinstance(answer, Manifest)
        assert (answer.problems, answer.replayed, answer.verified[:10]) == ((), 10, "unverified")


def test_describe_declares_the_engines_dtypes_and_checks_the_launch_weights() -> None:
    loader = ToyLoader(dtype=torch.bfloat16)
    loader.launched = checkpoint(2)
    loader.load_weights(loader.launched.items())
    with rig(loader) as r:
        answer = r.ask("describe", specs=specs_of(checkpoint(1)))["manifest"]
        assert set(answer.dtypes.values()) == {torch.bfloat16}
        assert answer.verified == "verified: 10 of 10 tensors against the launch weights"
        assert answer.problems == ()
        loader.model.norm.data.add_(1)
        again = r.ask("describe", specs=specs_of(checkpoint(1)))["manifest"]
        assert again.problems == (), "what was verified holds on; later syncs change the bytes"


def test_a_repacked_parameter_is_a_problem_unless_the_weights_are_gone_anyway() -> None:
    loader = ToyLoader()
    loader.launched = checkpoint(2)
    with rig(loader) as r:
        void = r.ask("describe", specs=specs_of(checkpoint(1)), void=True)["manifest"]
        assert (void.problems, void.verified[:10]) == ((), "unverified")
        answer = r.ask("describe", specs=specs_of(checkpoint(1)))["manifest"]
        assert sum("its live bytes are not" in problem for problem in answer.problems) == 7


def test_a_cast_that_a_loader_does_itself_is_a_copy_once_the_dtype_is_declared() -> None:
    class Casting(ToyLoader):
        def direct(self, param: torch.Tensor, weight: torch.Tensor) -> None:
            super().direct(param, weight.to(param.dtype))

    with rig(Casting(dtype=torch.bfloat16)) as r:
        answer = r.ask("describe", specs=specs_of(checkpoint(1)))["manifest"]
        assert answer.through_loader == {}
        assert answer.dtypes["norm.weight"] == torch.bfloat16


def test_attach_follows_a_plan_in_dtypes_that_were_not_described() -> None:
    wire_weights = checkpoint(1, torch.bfloat16)
    with rig(ToyLoader()) as r:
        r.ask("describe", specs=specs_of(checkpoint(1)))
        r.attach(wire_weights)
        r.sync(wire_weights, 1, "a")
        assert_holds(r.loader, wire_weights)


class Counting(ToyLoader):
    """Counts how often its launch checkpoint is read; a bf16 norm goes to other rows than an fp32 one."""

    reads = 0

    def launch_weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        self.reads += 1
        return super().launch_weights()

    def places(self) -> dict[str, Place]:
        def norm(weight: torch.Tensor) -> None:
            if self.other and weight.dtype == torch.bfloat16:
                self.model.norm.data.view(2, 6).t().copy_(weight.view(6, 2))
            else:
                self.direct(self.model.norm, weight)

        return {**super().places(), "norm.weight": norm}

    other = False


@pytest.mark.parametrize("other", [False, True])
def test_a_plan_that_was_recorded_anew_is_checked_if_it_writes_elsewhere(other: bool) -> None:
    loader = Counting()
    loader.launched = checkpoint(2)
    loader.load_weights(loader.launched.items())
    loader.other = other
    with rig(loader) as r:
        assert r.ask("describe", specs=specs_of(checkpoint(1)))["manifest"].verified.startswith("verified")
        if other:
            plan = Plan.pack(specs_of(checkpoint(1, torch.bfloat16)), 1024)
            with pytest.raises(Failed, match=r"does not take this plan: norm .*its live bytes are not"):
                r.ask("attach", plan=plan, tickets=[TICKET], first_index=0, timeout_s=1.0)
        else:
            r.attach(checkpoint(1, torch.bfloat16))
        assert loader.reads == 1 + other


class Wanting(ToyLoader):
    """Takes an optional buffer."""

    def accepts(self, name: str) -> bool:
        return name == "cache"

    def places(self) -> dict[str, Place]:
        return {**super().places(), "cache": lambda w: self.direct(self.targets()["cache"], w)}


@pytest.mark.parametrize("kind", [ToyLoader, Wanting])
def test_an_optional_tensor_that_another_engine_wants_is_let_pass(kind: type[ToyLoader]) -> None:
    weights = {**checkpoint(1), "cache": torch.randn(5)}
    with rig(kind()) as r:
        before = r.loader.targets()["cache"].clone()
        r.ask("describe", specs=specs_of(checkpoint(1)))
        r.attach(weights, optional=("cache",))
        updating = r.update(1, "a", digest=True)
        r.send(weights)
        assert updating.result(TIMEOUT_S)["digests"].keys() == weights.keys()
        expected = weights["cache"] if kind is Wanting else before
        assert torch.equal(r.loader.targets()["cache"], expected)
        assert_holds(r.loader, {name: tensor for name, tensor in weights.items() if name != "cache"})


def test_attach_refuses_a_plan_that_the_loader_does_not_take() -> None:
    with rig() as r:
        specs = [replace(spec, name=spec.name + "x") for spec in specs_of(checkpoint(1))]
        plan = Plan.pack(specs, 4096)
        sender = registry.transport("inproc").sender(slot_bytes=4096, num_slots=1, receivers=1, generation=1)
        with pytest.raises(Failed, match=r"MismatchError: toy 1.0 does not take this plan: embed.weightx"):
            r.ask("attach", plan=plan, tickets=[sender.ticket()], first_index=0, timeout_s=1.0)
        sender.close()


def test_each_worker_connects_under_its_own_index() -> None:
    rigs = [Rig(ToyLoader(rank, 2), rank=rank) for rank in range(2)]
    weights = checkpoint(4)
    plan = Plan.pack(specs_of(weights), 1024)
    sender = registry.transport("inproc").sender(slot_bytes=plan.capacity, num_slots=2, receivers=2, generation=1)
    for r in rigs:
        r.ask("attach", plan=plan, tickets=[sender.ticket()], first_index=0, timeout_s=TIMEOUT_S)
        r.sender, r.plan = sender, plan
    sender.accept(Deadline.after(TIMEOUT_S))
    updates = [r.update(1, "a") for r in rigs]
    rigs[0].send(weights)
    for r, updating in zip(rigs, updates, strict=True):
        updating.result(TIMEOUT_S)
        assert_holds(r.loader, weights)
        r.close()
