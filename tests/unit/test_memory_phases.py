"""Phases on a device that counts: orders and peaks, what is refused before anything moves, and ways that break off."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsync.deadline import Deadline
from wsync.errors import AdmissionError, ConfigError, MemoryStateError
from wsync.group import Group
from wsync.memory.device import Room, Usage
from wsync.memory.engine_tag import engine_tags
from wsync.memory.phases import Phases
from wsync.memory.transition import transition
from wsync.testing.fake_device import FakeDevice, FakeResident

ACTOR, ADAM, WEIGHTS, KV = 30, 60, 15, 50
PHASES = {
    "rollout": ["engine weights", "engine kv_cache"],
    "sync": ["actor", "engine weights"],
    "train": ["actor", "adam"],
}
ENGINE = ["engine weights", "engine kv_cache"]


class TaggedEngine:
    """The part of `wsync.Engine` that memory is about, on a device that counts."""

    name = "fake engine"

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.sizes = {"weights": WEIGHTS, "kv_cache": KV}
        self.calls: list[object] = []
        self.fails: Callable[[], None] = lambda: None
        for tag, nbytes in self.sizes.items():
            device.take(tag, nbytes, engine=True)

    @property
    def asleep(self) -> list[str]:
        return [tag for tag in self.sizes if tag not in self._device.engines]

    def sleep(self, level: int = 2) -> None:
        self.calls.append(level)
        self.fails()
        for tag in self.sizes:
            self._device.give(tag)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.calls.append(tags)
        self.fails()
        for tag in tags or ():
            self._device.take(tag, self.sizes[tag], engine=True)


class Rig:
    """An engine that is awake; actor and optimizer are offloaded already, as they do not fit beside it."""

    def __init__(self, total: int = 100, others: int = 0) -> None:
        self.device = FakeDevice(total, others)
        self.actor = self.offloaded("actor", ACTOR)
        self.adam = self.offloaded("adam", ADAM)
        self.engine = TaggedEngine(self.device)
        tags = engine_tags(self.engine, "engine", 2)  # type: ignore[arg-type]
        self.device.log.clear()
        self.phases = Phases(
            [*tags, self.adam, self.actor],
            PHASES,
            device=self.device,
            group=Group(0, 1, None, 5.0),
            together=[ENGINE],
        )

    def offloaded(self, name: str, nbytes: int) -> FakeResident:
        resident = FakeResident(self.device, name, nbytes)
        resident.release(Deadline.after(1))
        self.device.empty_cache()
        return resident


def test_each_phase_peaks_at_what_its_residents_add_up_to() -> None:
    """And on the way between two there is never more than on the fuller side of it."""
    rig = Rig()
    rig.phases.enter("rollout")
    sums = {"train": ACTOR + ADAM, "sync": ACTOR + WEIGHTS, "rollout": WEIGHTS + KV}
    for _ in range(3):
        before = sums["rollout"]
        for phase, residents in sums.items():
            rig.phases.enter(phase)
            left, _, way = rig.device.peaks[-3:]
            assert (left, way) == (before, max(before, residents))
            before = residents
    assert rig.device.total == 100 < ACTOR + ADAM + WEIGHTS + KV


def test_the_order_is_release_then_cache_then_restore() -> None:
    rig = Rig()
    rig.phases.enter("rollout")
    assert rig.device.log == []
    rig.phases.enter("train")
    assert rig.device.log == ["give weights", "give kv_cache", "empty cache", "take actor", "take adam"]
    rig.device.log.clear()
    rig.phases.enter("sync")
    assert rig.device.log == ["give adam", "empty cache", "take weights"]
    rig.device.log.clear()
    rig.phases.enter("rollout")
    assert rig.device.log == ["give actor", "empty cache", "take kv_cache"]
    assert rig.engine.calls == [2, ["weights"], ["kv_cache"]]


def test_trainer_weights_never_stand_beside_the_kv_cache() -> None:
    """Also where all of it would fit: from every phase to every other."""
    rig = Rig(total=1000)
    together: list[str] = []
    take = rig.device.take

    def watched(owner: str, nbytes: int, *, engine: bool = False) -> None:
        take(owner, nbytes, engine=engine)
        if {"actor", "kv_cache"} <= {*rig.device.tensors, *rig.device.engines}:
            together.append(owner)

    rig.device.take = watched  # type: ignore[method-assign]
    for phase in ("rollout", "sync", "rollout", "train", "sync", "rollout", "train"):
        rig.phases.enter(phase)
    assert together == []


def test_entering_again_moves_nothing() -> None:
    rig = Rig()
    rig.phases.enter("train")
    rig.device.log.clear()
    rig.phases.enter("train")
    assert rig.device.log == []
    assert rig.phases.moves == []


def test_every_move_is_measured_by_tag() -> None:
    rig = Rig()
    rig.phases.enter("train")
    assert [(str(move.step), move.freed) for move in rig.phases.moves] == [
        ("release engine weights", WEIGHTS + KV),
        ("release engine kv_cache", 0),
        ("empty cache", 0),
        ("restore actor", -ACTOR),
        ("restore adam", -ADAM),
    ]
    rig.phases.enter("sync")
    rig.phases.enter("rollout")
    assert rig.phases.present == {"engine weights": WEIGHTS, "engine kv_cache": KV}


def test_what_each_tag_of_an_engine_takes_is_told_once_it_has_come_back() -> None:
    """And every step of every way is kept, with what it freed."""
    rig = Rig()
    assert rig.phases.sizes == {"engine weights": None, "engine kv_cache": None, "adam": ADAM, "actor": ACTOR}
    assert "on the device: engine weights not measured yet, engine kv_cache not measured yet, adam 60 B" in (
        rig.phases.explain()
    )
    for phase in ("train", "sync"):
        rig.phases.enter(phase)
    assert [rig.phases.sizes[name] for name in ENGINE] == [WEIGHTS, KV]  # all of it left, and one part came back
    for phase in ("rollout", "train", "sync", "rollout"):
        rig.phases.enter(phase)
    assert "on the device: engine weights 15 B, engine kv_cache 50 B, adam 60 B, actor 30 B" in rig.phases.explain()
    heads, *rows = (line.split() for line in rig.phases.ledger.moves_table().splitlines())
    assert heads == ["step", "times", "seconds", "freed", "of", "tensors"]
    cells = {" ".join(row[:-6]): (row[-6], " ".join(row[-4:-2])) for row in rows}
    assert cells == {
        "release engine weights": ("2", f"{WEIGHTS + KV} B"),
        "release engine kv_cache": ("2", "0 B"),
        "empty cache": ("6", "30 B"),  # after an engine 0, after the actor 30, after adam 60
        "restore actor": ("2", f"{-ACTOR} B"),
        "restore adam": ("2", f"{-ADAM} B"),
        "release adam": ("2", "0 B"),
        "restore engine weights": ("2", f"{-WEIGHTS} B"),
        "release actor": ("2", "0 B"),
        "restore engine kv_cache": ("2", f"{-KV} B"),
    }
    told = rig.phases.ledger.to_json()["moves"]
    assert (told[0]["phase"], told[0]["step"], told[0]["freed_bytes"]) == ("train", "release engine weights", 65)


def test_what_does_not_fit_is_refused_before_anything_moves() -> None:
    rig = Rig()
    rig.phases.enter("train")
    rig.phases.enter("sync")
    rig.device.others = 45  # now 10 are free, and 40 when the actor has left
    rig.device.log.clear()
    with pytest.raises(AdmissionError, match=r"'rollout' needs 50 B \(engine kv_cache 50 B\).*room for 40 B") as caught:
        rig.phases.enter("rollout")
    for words in ("10 B are missing", "engine weights 15 B", "other processes 45 B", "Nothing was moved"):
        assert words in str(caught.value)
    assert rig.device.log == []
    assert rig.phases.phase == "sync"
    rig.device.others = 35
    rig.phases.enter("rollout")
    assert rig.phases.phase == "rollout"


def test_an_engine_of_unknown_size_is_asked_to_leave_before_it_is_known_whether_that_is_enough() -> None:
    rig = Rig(total=80)
    with pytest.raises(AdmissionError, match=r"'train' needs 90 B.*room for 80 B of 80 B") as caught:
        rig.phases.enter("train")
    assert "Done so far: release engine weights, release engine kv_cache, empty cache" in str(caught.value)
    assert rig.phases.phase is None
    assert rig.phases.present == {}
    rig.phases.enter("rollout")
    rig.device.log.clear()
    with pytest.raises(AdmissionError, match="Nothing was moved"):  # now it is known
        rig.phases.enter("train")
    assert rig.device.log == []


def test_what_a_phase_will_allocate_counts() -> None:
    rig = Rig()
    rig.phases.enter("train")
    with pytest.raises(AdmissionError, match=r"engine weights 0 B, slots 71 B"):
        rig.phases.enter("sync", {"slots": 71})
    rig.phases.enter("sync", {"slots": 55})


def test_a_cache_that_is_not_emptied_yet_counts_as_room() -> None:
    rig = Rig()
    rig.phases.enter("train")
    rig.device.take("activations", 10)
    rig.device.give("activations")
    assert rig.device.free == 0
    rig.phases.enter("sync")


def test_an_error_on_the_way_leaves_a_stated_phase_and_the_next_way_starts_there() -> None:
    rig = Rig()
    rig.phases.enter("train")

    def broken() -> None:
        raise RuntimeError("the engine died")

    rig.engine.fails = broken
    with pytest.raises(RuntimeError, match="the engine died"):
        rig.phases.enter("sync")
    assert rig.phases.phase is None
    assert set(rig.phases.present) == {"actor"}
    rig.phases.enter("train")
    assert set(rig.phases.present) == {"actor", "adam"}
    rig.engine.fails = lambda: None
    rig.phases.enter("sync")
    assert rig.phases.phase == "sync"


def test_an_engine_that_is_half_awake_does_not_fall_asleep() -> None:
    rig = Rig()
    rig.phases.enter("train")
    rig.phases.enter("sync")
    rig.device.log.clear()
    with pytest.raises(MemoryStateError, match="engine weights cannot leave while kv_cache of fake engine is away"):
        rig.phases.enter("train")
    assert rig.device.log == []
    assert rig.phases.phase == "sync"


def test_paired_calls() -> None:
    rig = Rig()
    rig.phases.enter("rollout")
    deadline = Deadline.after(1)
    weights, kv_cache = (rig.phases.residents[name] for name in ENGINE)
    with pytest.raises(MemoryStateError, match="engine weights is on the device already"):
        weights.restore(deadline)
    weights.release(deadline)
    with pytest.raises(MemoryStateError, match="engine kv_cache is away already"):
        kv_cache.release(deadline)
    with pytest.raises(MemoryStateError, match="actor is away already"):
        rig.actor.release(deadline)


def test_names_that_do_not_exist() -> None:
    rig = Rig()
    with pytest.raises(ConfigError, match="no phase 'eval'; there are rollout, sync, train"):
        rig.phases.enter("eval")
    with pytest.raises(ConfigError, match=r"phase 'x' names \['critic'\]"):
        Phases([], {"x": ["critic"]}, device=rig.device, group=Group(0, 1, None, 5.0))
    twice = [FakeResident(FakeDevice(9), "a", 1), FakeResident(FakeDevice(9), "a", 1)]
    with pytest.raises(ConfigError, match="names of their own"):
        Phases(twice, {}, device=rig.device, group=Group(0, 1, None, 5.0))


def test_one_frozen_model_at_a_time() -> None:
    rig = Rig(total=200)
    frozen = [rig.offloaded(name, 20) for name in ("reference", "reward")]
    phases = Phases(
        [rig.adam, rig.actor, *frozen], {"train": ["actor"]}, device=rig.device, group=Group(0, 1, None, 5.0)
    )
    with pytest.raises(MemoryStateError, match="enter one first"), phases.using("reference"):
        pass
    phases.enter("train")
    with phases.using("reference"):
        assert set(phases.present) == {"actor", "reference"}
        with pytest.raises(MemoryStateError, match="reference is in use; one at a time"), phases.using("reward"):
            pass
        with pytest.raises(MemoryStateError, match="reference is in use; leave that block"):
            phases.enter("train")
    with pytest.raises(ZeroDivisionError), phases.using("reward"):
        raise ZeroDivisionError
    assert set(phases.present) == {"actor"}


def test_the_error_of_a_block_comes_before_that_of_leaving_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(total=200)
    reference = rig.offloaded("reference", 20)
    phases = Phases([rig.actor, reference], {"train": ["actor"]}, device=rig.device, group=Group(0, 1, None, 5.0))
    phases.enter("train")

    def refuse(*args: object) -> None:
        raise MemoryStateError("in the middle of a forward")

    def forward() -> None:
        monkeypatch.setattr(phases, "_go", refuse)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), phases.using("reference"):
        forward()
    assert "reference stays on the device: in the middle of a forward" in caplog.text
    monkeypatch.undo()
    phases.enter("train")
    assert set(phases.present) == {"actor"}


def test_explain_prints_every_way() -> None:
    text = Rig().phases.explain()
    assert "sync -> rollout: release actor, empty cache, restore engine kv_cache" in text
    assert "train -> sync: release adam, empty cache, restore engine weights" in text
    assert "rollout -> train: release engine weights, release engine kv_cache, empty cache, restore actor, " in text


NAMES = ["a", "b", "c", "d", "e"]


@given(
    st.lists(st.sampled_from(NAMES), unique=True),
    st.sets(st.sampled_from(NAMES)),
    st.sets(st.sampled_from(NAMES)),
)
def test_any_way_ends_with_what_is_wanted(wanted: list[str], present: set[str], both: set[str]) -> None:
    """From any state, on ranks that differ: what leaves does so first, and nothing comes that is there everywhere."""
    here = present | both
    absent = (set(NAMES) - present) | both
    steps = transition(wanted, present=here, absent=absent, together=[("a", "b")], order=NAMES)
    assert [step.action for step in steps] == sorted((step.action for step in steps), key=_ACTIONS.index)
    now = set(here)
    for step in steps:
        if step.action == "release":
            assert step.resident in now
            now.remove(step.resident)
        elif step.action == "restore":
            now.add(step.resident)
    assert now == set(wanted)


_ACTIONS = ["release", "empty cache", "restore"]


class Slow(FakeDevice):
    """Counts how often it was asked for what takes long to tell."""

    closely = 0

    def usage(self) -> Usage:
        self.closely += 1
        return super().usage()

    def room(self) -> Room:
        now = super().usage()
        return Room(total=now.total, free=now.free, allocated=now.allocated, reserved=now.reserved)


def test_steps_do_not_wait_for_what_only_the_ledger_tells() -> None:
    device = Slow(total=100)
    residents = [FakeResident(device, name, 10) for name in ("a", "b", "c", "d")]
    wanted = {"all": ["a", "b", "c", "d"], "none": []}
    phases = Phases(residents, wanted, device=device, group=Group(0, 1, None, 5.0))
    phases.enter("all")
    device.closely = 0
    phases.enter("none")
    phases.enter("all")
    assert len(phases.ledger.entries()) > 3
    assert device.closely == 6  # leaving, on the way, and entering, twice
