"""Phases on several ranks: one step after the other everywhere, whatever each rank has of it."""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import wsync
from tests.unit.test_memory_phases import ACTOR, ENGINE, KV, PHASES, WEIGHTS, TaggedEngine
from wsync.deadline import Deadline
from wsync.memory.engine_tag import engine_tags
from wsync.memory.phases import Phases
from wsync.memory.resident import Resident
from wsync.testing.fake_device import FakeDevice, FakeResident
from wsync.testing.ranks import Rank, run_ranks
from wsync.trainer_ranks import new_group


class SlowActor(FakeResident):
    """The last of all ranks to leave: the others are through with it before it begins."""

    def release(self, deadline: Deadline) -> None:
        store = _get_default_store()
        store.add("leaving", 1)
        if dist.get_rank() == 1:
            store.wait(["rank 0 has left"], timedelta(seconds=20))
        super().release(deadline)
        store.set(f"rank {dist.get_rank()} has left", "yes")


class JealousEngine(TaggedEngine):
    """Wakes its cache on all devices, which nobody's actor may be on then."""

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if tags == ["kv_cache"]:
            assert _get_default_store().check(["rank 0 has left", "rank 1 has left"])
        super().wake_up(tags)


class NeighbourDevice(FakeDevice):
    """Another rank's engine has a worker here, which takes 600 while it is awake."""

    @property
    def free(self) -> int:
        asleep = _get_default_store().check(["asleep"])
        return super().free - (0 if asleep else 600)


class TellingEngine(TaggedEngine):
    """What it does is seen on the device of the other rank."""

    def sleep(self, level: int = 2) -> None:
        super().sleep(level)
        _get_default_store().set("asleep", "yes")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        super().wake_up(tags)
        _get_default_store().delete_key("asleep")


def a_worker_of_another_ranks_engine(me: Rank) -> list[tuple[str | None, str]]:
    """Rank 1 has an actor that fits only where the engine of rank 0 is not, and no engine to ask."""
    device = NeighbourDevice(1000) if me.rank else FakeDevice(1000)
    actor = FakeResident(device, "actor", 100)
    actor.release(Deadline.after(1))
    device.empty_cache()
    if me.rank:
        actor._nbytes = 700
    residents: list[Resident] = [actor]
    phases, together = {"rollout": [], "train": ["actor"]}, []
    if me.rank == 0:
        residents = [*engine_tags(TellingEngine(device), "engine", 2), actor]  # type: ignore[arg-type]
        phases, together = {"rollout": ENGINE, "train": ["actor"]}, [ENGINE]
    managed = Phases(residents, phases, device=device, group=new_group("memory", 20.0), together=together)
    found = []
    for phase in ("rollout", "train", "rollout", "train"):
        words = ""
        try:
            managed.enter(phase)
        except wsync.WsyncError as error:
            words = f"{type(error).__name__}: {error}"
        found.append((managed.phase, words))
    return found


class Rig:
    """The engine belongs to rank 0."""

    def __init__(self, me: Rank) -> None:
        self.device = FakeDevice(1000)
        self.actor = SlowActor(self.device, "actor", ACTOR)
        self.adam = FakeResident(self.device, "adam", 1)
        residents: list[Resident] = [self.adam, self.actor]
        phases = {"rollout": [], "sync": ["actor"], "train": ["actor", "adam"]}
        together: list[list[str]] = []
        if me.rank == 0:
            self.engine = JealousEngine(self.device)
            residents = [*engine_tags(self.engine, "engine", 2), *residents]  # type: ignore[arg-type]
            phases, together = PHASES, [ENGINE]
        self.phases = Phases(residents, phases, device=self.device, group=new_group("memory", 20.0), together=together)


def one_after_the_other(me: Rank) -> list[list[str]]:
    rig = Rig(me)
    found = []
    for phase in ("train", "sync", "rollout"):
        rig.phases.enter(phase)
        found.append([str(move.step) for move in rig.phases.moves])
    if me.rank == 0:
        assert rig.phases.present == {"engine weights": WEIGHTS, "engine kv_cache": KV}
    return found


def a_rank_fails_on_the_way(me: Rank) -> tuple[str, str, bool, bool]:
    rig = Rig(me)
    rig.phases.enter("train")
    if me.rank == 1:
        rig.adam.release = None  # type: ignore[assignment, method-assign]
    words = ""
    try:
        rig.phases.enter("sync")
    except (wsync.RankError, TypeError) as error:
        words = f"{type(error).__name__}: {error}"
    between = rig.phases.phase is None
    there = rig.adam.present
    if me.rank == 1:
        del rig.adam.release
    rig.phases.enter("train")
    return words, str(rig.phases.phase), between, there


def too_little_room_on_one_rank(me: Rank) -> tuple[str, list[str], str | None]:
    rig = Rig(me)
    rig.phases.enter("train")
    rig.phases.enter("sync")
    rig.phases.enter("rollout")
    rig.device.log.clear()
    if me.rank == 1:
        rig.device.others = 1000
    words = "nothing"
    try:
        rig.phases.enter("train")
    except (wsync.RankError, wsync.AdmissionError) as error:
        words = f"{type(error).__name__}: {error}"
    return words, rig.device.log, rig.phases.phase


def different_phases(me: Rank) -> str:
    rig = Rig(me)
    try:
        rig.phases.enter(("train", "sync")[me.rank])
    except wsync.ConfigError as error:
        return str(error)
    return "nothing"


def test_steps_are_taken_in_turn_by_all_ranks() -> None:
    first, second = run_ranks(one_after_the_other, 2, timeout_s=60)
    assert first == second
    assert first[2] == ["release actor", "empty cache", "restore engine kv_cache"]


def test_a_failure_is_heard_everywhere_and_the_next_way_starts_from_what_is_there() -> None:
    first, second = run_ranks(a_rank_fails_on_the_way, 2, timeout_s=60)
    assert first[0].startswith("RankError")
    assert "'release adam'" in first[0]
    assert second[0].startswith("TypeError")
    assert [(one[1], one[2]) for one in (first, second)] == [("train", True)] * 2
    assert (first[3], second[3]) == (False, True), "what the ranks have does not differ: the test proves little"


def test_too_little_room_on_one_rank_moves_nothing_on_any() -> None:
    first, second = run_ranks(too_little_room_on_one_rank, 2, timeout_s=60)
    assert first[0].startswith("RankError")
    assert second[0].startswith("AdmissionError: phase 'train' needs 31 B")
    assert "31 B are missing" in first[0]
    assert [one[1:] for one in (first, second)] == [([], "rollout")] * 2


def test_what_another_ranks_engine_gives_back_here_counts() -> None:
    for found in run_ranks(a_worker_of_another_ranks_engine, 2, timeout_s=60):
        assert found == [(phase, "") for phase in ("rollout", "train", "rollout", "train")]


def test_ranks_that_enter_different_phases() -> None:
    for words in run_ranks(different_phases, 2, timeout_s=60):
        assert words == "trainer ranks enter different phases: ['train', 'sync']"
