"""Models and optimizers that leave memory and come back: bits, objects, training, and every way in which that fails."""

from collections.abc import Iterable
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.offload_models import MODELS, copies, made, same, soon, step, storage_bytes, tensors
from wsync.deadline import Deadline
from wsync.errors import AdmissionError, ConfigError, MemoryStateError, SyncTimeout, UnsupportedError
from wsync.memory.host_copies import HostCopies
from wsync.memory.host_pool import Block, HostPool
from wsync.memory.offload import Offload
from wsync.memory.residents import resident_for_model, resident_for_optimizer


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.untyped_storage().nbytes() for value in states if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("name", MODELS)
def test_training_goes_on_as_if_nothing_had_happened(name: str) -> None:
    pool = HostPool()
    model, optimizer = made(name)
    alone, its_optimizer = made(name)
    resident = resident_for_model("actor", model, pool)
    states = resident_for_optimizer("adamw", optimizer, pool)
    objects, layout = list(model.parameters()), [tensor.stride() for tensor in tensors(model)]
    for cycle in range(4):
        taken = storage_bytes(model)
        assert resident.nbytes == resident.host_nbytes == taken > 0
        resident.release(soon())
        states.release(soon())
        assert storage_bytes(model) == optimizer_bytes(optimizer) == 0
        assert resident.nbytes == taken
        assert not resident.present
        states.restore(soon())
        resident.restore(soon())
        assert storage_bytes(model) == taken
        assert same(tensors(model), tensors(alone))
        for one, its in ((model, optimizer), (alone, its_optimizer)):
            step(one, its, cycle, keep_gradients=cycle == 2)
    assert all(one is other for one, other in zip(objects, model.parameters(), strict=True))
    assert layout == [tensor.stride() for tensor in tensors(model)]
    assert same(tensors(model), tensors(alone))
    assert not same(tensors(model), tensors(made(name)[0])), "nothing was trained"


def test_gradients_leave_too_and_come_back() -> None:
    model, optimizer = made("tied")
    alone, its_optimizer = made("tied")
    resident = resident_for_model("actor", model, HostPool())
    for one in (model, alone):
        one(torch.ones(4, 8)).sum().backward()
    resident.release(soon())
    assert storage_bytes(model) == 0
    resident.restore(soon())
    optimizer.step()
    its_optimizer.step()
    assert same(tensors(model), tensors(alone))


def test_states_that_are_not_there_before_the_first_step() -> None:
    model, optimizer = made("plain")
    states = resident_for_optimizer("adamw", optimizer, HostPool())
    assert states.nbytes == 0
    states.release(soon())
    assert not states.present
    states.restore(soon())
    step(model, optimizer, 0)
    taken = states.nbytes
    assert taken is not None
    assert taken >= 2 * sum(parameter.nbytes for parameter in model.parameters())
    states.release(soon())
    assert optimizer_bytes(optimizer) == 0
    states.restore(soon())


def test_lists_and_mappings_of_states() -> None:
    model = nn.Linear(4, 4)
    optimizer: Any = torch.optim.LBFGS(model.parameters(), history_size=3)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found: torch.Tensor = model(torch.ones(2, 4)).square().sum()
        torch.autograd.backward(found)
        return found

    for _ in range(2):
        optimizer.step(loss)
    states = resident_for_optimizer("lbfgs", optimizer, HostPool())
    history = next(iter(optimizer.state.values()))["old_dirs"]
    before = [tensor.clone() for tensor in history]
    states.release(soon())
    assert {tensor.untyped_storage().nbytes() for tensor in history} == {0}
    states.restore(soon())
    assert same(before, history)


def test_a_mapped_checkpoint_gets_memory_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(torch.arange(64, dtype=torch.float32).numpy().tobytes())
    mapped = torch.from_file(str(path), shared=False, size=64)
    model = nn.Module()
    model.one, model.other = nn.Parameter(mapped[:32]), nn.Parameter(mapped[32:])
    assert not model.one.untyped_storage().resizable(), "nothing to do any more"
    objects, before = list(model.parameters()), copies(model)
    resident = resident_for_model("actor", model, HostPool())
    resident.release(soon())
    assert storage_bytes(model) == 0
    resident.restore(soon())
    assert same(tensors(model), before)
    assert all(one is other for one, other in zip(objects, model.parameters(), strict=True))


def test_host_memory_is_the_same_at_every_cycle() -> None:
    pool = HostPool()
    model, _ = made("large")
    resident = resident_for_model("actor", model, pool)
    seen = set()
    for _ in range(3):
        resident.release(soon())
        assert isinstance(resident, Offload)
        assert resident._away is not None
        seen.add(tuple(sorted(entry.host.data_ptr() for entry in resident._away)))
        resident.restore(soon())
    assert len(seen) == 1


def test_calls_come_in_pairs() -> None:
    model, _ = made("plain")
    resident = resident_for_model("actor", model, HostPool())
    for call in (resident.check_restore, lambda: resident.restore(soon())):
        with pytest.raises(MemoryStateError, match="actor is present; release it before it is restored"):
            call()
    resident.release(soon())
    for call in (resident.check_release, lambda: resident.release(soon())):
        with pytest.raises(MemoryStateError, match="actor is away already; restore it before it is released again"):
            call()
    resident.check_restore()
    resident.restore(soon())


def fill(model: nn.Module) -> None:
    weight = model.get_parameter("0.weight")
    weight.untyped_storage().resize_(weight.numel() * 4)


def assign(model: nn.Module) -> None:
    model.get_parameter("0.weight").data = torch.ones(16, 8)


def load(model: nn.Module) -> None:
    model.load_state_dict(made("plain")[0].state_dict(), assign=True)


@pytest.mark.parametrize("replace", [fill, assign, load])
def test_memory_that_somebody_gave_to_the_tensors_meanwhile(replace: object) -> None:
    assert callable(replace)
    model, _ = made("plain")
    resident = resident_for_model("actor", model, HostPool())
    resident.release(soon())
    replace(model)
    for call in (resident.check_restore, lambda: resident.restore(soon())):
        with pytest.raises(MemoryStateError, match=r"actor is away, and tensor 0 \(torch.float32 \[16, 8\]\)"):
            call()
    assert not resident.present


def test_a_state_dict_that_an_optimizer_loaded_while_it_was_away() -> None:
    model, optimizer = made("plain")
    step(model, optimizer, 0)
    saved = deepcopy(optimizer.state_dict())
    states = resident_for_optimizer("adamw", optimizer, HostPool())
    states.release(soon())
    optimizer.load_state_dict(saved)
    with pytest.raises(MemoryStateError, match="adamw is away, and tensor 0"):
        states.restore(soon())


def test_a_numpy_view_of_what_is_away() -> None:
    """NumPy fixes the size of the storage, which is 0 then: this is told before anything moves."""
    model = nn.Linear(4, 4)
    resident = resident_for_model("actor", model, HostPool())
    resident.release(soon())
    model.weight.detach().numpy()
    for _ in range(2):
        with pytest.raises(
            MemoryStateError, match="actor is away, and 1 of its 2 storages can no longer be given memory"
        ):
            resident.restore(soon())
        assert not resident.present
        assert storage_bytes(model) == 0


def test_a_numpy_view_of_what_is_present() -> None:
    model = nn.Linear(4, 4)
    before = copies(model)
    model.weight.detach().numpy()
    resident = resident_for_model("actor", model, HostPool())
    resident.release(soon())
    resident.restore(soon())
    assert same(tensors(model), before)


def test_no_room_on_the_host() -> None:
    model, _ = made("large")
    before = copies(model)
    resident = resident_for_model("actor", model, HostPool(1 << 20))
    words = r"actor needs 4\d+ more bytes \(4.3 MiB\) of host memory; the budget is 1.0 MiB and the pool holds 0 B"
    for call in (resident.check_release, lambda: resident.release(soon())):
        with pytest.raises(AdmissionError, match=words):
            call()
    assert resident.present
    assert same(tensors(model), before)


def test_names_are_not_shared() -> None:
    pool = HostPool()
    one, other = (resident_for_model("actor", made("plain")[0], pool) for _ in range(2))
    one.release(soon())
    with pytest.raises(ConfigError, match="two things named 'actor'"):
        other.release(soon())
    assert other.present


class Faulty(HostPool):
    """Has no room for block number `fails_at`."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.fails_at = fails_at

    def _allocate(self, nbytes: int, pinned: bool) -> Block:
        self.fails_at -= 1
        if self.fails_at < 0:
            raise AdmissionError("injected")
        return super()._allocate(nbytes, pinned)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_failure_at_any_block_leaves_the_model_present(fails_at: int) -> None:
    model, _ = made("large")
    before, pool = copies(model), Faulty(fails_at)
    resident = resident_for_model("actor", model, pool)
    with pytest.raises(AdmissionError, match="injected"):
        resident.release(soon())
    assert resident.present
    assert same(tensors(model), before)
    pool.fails_at = 10
    resident.release(soon())
    assert storage_bytes(model) == 0
    resident.restore(soon())
    assert same(tensors(model), before)


def failing_copies(patch: pytest.MonkeyPatch, survive: int) -> None:
    """Copies break off after `survive` tensors."""
    healthy = HostCopies.run

    def run(
        self: HostCopies, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], deadline: Deadline, what: str
    ) -> None:
        healthy(self, islice(pairs, survive), deadline, what)
        raise OSError("injected")

    patch.setattr(HostCopies, "run", run)


@pytest.mark.parametrize("survive", [0, 2])
def test_copies_that_break_off(survive: int) -> None:
    model, optimizer = made("large")
    before = copies(model)
    resident = resident_for_model("actor", model, HostPool())
    with pytest.MonkeyPatch.context() as patch:
        failing_copies(patch, survive)
        with pytest.raises(OSError, match="injected"):
            resident.release(soon())
    assert resident.present
    assert same(tensors(model), before)
    step(model, optimizer, 0)
    before = copies(model)
    resident.release(soon())
    with pytest.MonkeyPatch.context() as patch:
        failing_copies(patch, survive)
        with pytest.raises(OSError, match="injected"):
            resident.restore(soon())
    assert not resident.present
    assert storage_bytes(model) == 0
    resident.restore(soon())
    assert same(tensors(model), before)


def test_deadlines() -> None:
    model, _ = made("plain")
    before = copies(model)
    resident = resident_for_model("actor", model, HostPool())
    with pytest.raises(SyncTimeout, match="still waiting for actor to be copied to the host"):
        resident.release(Deadline.after(0.0))
    assert resident.present
    resident.release(soon())
    with pytest.raises(SyncTimeout, match="still waiting for actor to be copied to the device"):
        resident.restore(Deadline.after(0.0))
    assert not resident.present
    resident.restore(soon())
    assert same(tensors(model), before)


def test_what_cannot_be_offloaded_is_refused_by_name() -> None:
    pool = HostPool()
    with pytest.raises(UnsupportedError, match=r"the model actor is a builtins.str; a torch.nn.Module"):
        resident_for_model("actor", "a path", pool)
    with pytest.raises(UnsupportedError, match=r"the optimizer adamw is a torch.nn.modules.linear.Linear; the state"):
        resident_for_optimizer("adamw", nn.Linear(2, 2), pool)
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    resident = resident_for_model("actor", model, pool)
    with pytest.raises(UnsupportedError, match=r"layout torch.sparse_coo, which cannot be offloaded"):
        resident.check_release()
    model.weight.grad = None
    resident.release(soon())
    resident.restore(soon())
