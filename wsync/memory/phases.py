"""Residents on one device, and phases that say which of them are there: what leaves goes first, then what comes.

Every rank enters the same phases in the same order. A step is done on all ranks before the next one begins: an engine's
workers may sit on the devices of several.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import Any, cast

from wsync.deadline import Deadline
from wsync.errors import ConfigError, MemoryStateError, WsyncError
from wsync.group import Group
from wsync.memory.admission import admit
from wsync.memory.device import Device
from wsync.memory.ledger import Ledger
from wsync.memory.move import Move
from wsync.memory.resident import Resident
from wsync.memory.sizes import gib
from wsync.memory.transition import Step, transition

_log = logging.getLogger(__name__)
_NOTHING: Mapping[str, int] = {}


class Phases:
    """Where everything is, and the way from one phase to the next.

    Attributes:
        residents: of this rank, by name.
        phase: the one that was entered last; None before the first, and after a way that broke off: then `present`
            says what is there, and the next `enter` starts from that.
        ledger: memory over time, and what every step of every way did.
        moves: what each step of the last way did.
    """

    def __init__(
        self,
        residents: Sequence[Resident],
        phases: Mapping[str, Sequence[str]],
        *,
        device: Device,
        group: Group,
        together: Sequence[Sequence[str]] = (),
    ) -> None:
        """Nothing moves before the first `enter`.

        Args:
            residents: of this rank, in the order in which they leave. Other ranks may have others.
            phases: name -> residents, in the order in which they come.
            device: where they are.
            group: the trainer's ranks. `group.timeout_s` is the longest wait for one step.
            together: see `transition`.

        Raises `ConfigError` if a name is there twice, or a phase names what does not exist.
        """
        self.residents = {resident.name: resident for resident in residents}
        if len(self.residents) < len(residents):
            raise ConfigError(f"residents need names of their own; these are {[one.name for one in residents]}")
        self._phases = {phase: tuple(wanted) for phase, wanted in phases.items()}
        for phase, wanted in self._phases.items():
            if unknown := [name for name in wanted if name not in self.residents]:
                raise ConfigError(f"phase {phase!r} names {unknown}; there are {', '.join(self.residents)}")
        self._device, self._group = device, group
        self._together = [tuple(some) for some in together]
        self._order = list(self.residents)
        self._measured: dict[tuple[str, ...], int] = {}
        """Bytes of residents that do not know their own, one by one or of several that leave together."""
        self._entering = threading.Lock()
        self._guest: str | None = None
        self.phase: str | None = None
        self.ledger = Ledger(device)
        self.moves: list[Move] = []

    @property
    def present(self) -> Mapping[str, int]:
        """Residents of this rank that are on the device, with their bytes; 0 for what nobody has measured yet."""
        return {name: self._nbytes(name) for name, resident in self.residents.items() if resident.present}

    @property
    def sizes(self) -> Mapping[str, int | None]:
        """Bytes that each resident of this rank takes of the device: what it knows, or what its moves have shown.

        None for a tag of an engine that has not been measured yet: all tags leave together, and each one shows its
        bytes when it comes back.
        """
        return {name: self._size(name) for name in self.residents}

    def enter(self, phase: str, more: Mapping[str, int] = _NOTHING) -> None:
        """*Collective.* Let `phase` have just what it needs. Does nothing if that is so already.

        Args:
            phase: one of those that were given.
            more: what else will be allocated in it, name -> bytes: it must fit too.

        Raises:
            ConfigError: there is no such phase, or the ranks enter different ones.
            AdmissionError: it does not fit on the device, or what leaves does not fit on the host. Nothing was moved,
                or, if only the going of an engine could tell its size, nothing has come yet; the message says which.
            MemoryStateError: something cannot leave or come now, or another thread is on its way. Nothing was moved.
            RankError: another rank failed.
        Whatever a resident raises ends the way: `phase` is None then, and every resident is where it is said to be.
        """
        if self._guest is not None:
            raise MemoryStateError(f"{self._guest} is in use; leave that block before you enter {phase!r}")
        if phase not in self._phases:
            raise ConfigError(f"there is no phase {phase!r}; there are {', '.join(self._phases)}")
        self._go(phase, self._phases[phase], more)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """*Collective.* Have one more resident beside those of the phase, for a block. Not to be nested.

        What the block raises comes through, also if the resident cannot leave then: in the middle of a forward, say.
        """
        if name not in self.residents:
            raise ConfigError(f"there is no {name!r}; there are {', '.join(self.residents)}")
        if self.phase is None:
            raise MemoryStateError(f"{name} comes beside the residents of a phase; enter one first")
        if self._guest is not None:
            raise MemoryStateError(f"{self._guest} is in use; one at a time")
        phase = self.phase
        self._go(phase, (*self._phases[phase], name), _NOTHING)
        self._guest = name
        try:
            yield
        except BaseException:
            self._guest = None
            try:
                self._go(phase, self._phases[phase], _NOTHING)
            except WsyncError as error:
                _log.warning("%s stays on the device: %s", name, error)
            raise
        self._guest = None
        self._go(phase, self._phases[phase], _NOTHING)

    def explain(self) -> str:
        """What each resident takes of this rank's device, and every way from one phase to another, step by step."""
        taken = (f"{name} {'not measured yet' if size is None else gib(size)}" for name, size in self.sizes.items())
        text = [f"device: {self._device.describe()}", f"on the device: {', '.join(taken) or 'nothing'}"]
        text += [f"{phase}: {', '.join(wanted) or 'nothing'}" for phase, wanted in self._phases.items()]
        for before, after in permutations(self._phases, 2):
            held = self._phases[before]
            steps = self._steps(self._phases[after], held, [name for name in self.residents if name not in held])
            text.append(f"{before} -> {after}: {', '.join(map(str, steps)) or 'nothing'}")
        return "\n".join(text)

    def _go(self, phase: str, wanted: Sequence[str], more: Mapping[str, int]) -> None:
        if not self._entering.acquire(blocking=False):
            raise MemoryStateError(f"another thread is on its way to a phase; {phase!r} must wait")
        try:
            self._group.enter()
            steps = self._agree(phase, wanted)
            leaving = [step for step in steps if step.action != "restore"]
            coming = [step for step in steps if step.action == "restore"]
            self._everywhere("look ahead", lambda: self._check(phase, steps, more))
            if steps:
                self._mark(self.phase or "start", "left")
                self._mark(f"to {phase}", "began")
            self.phase, self.moves = None, []
            for step in leaving:
                self._take(phase, step)
            if leaving and (coming or more):
                self._everywhere("make room", lambda: self._admit(phase, coming, [], more))
            for step in coming:
                self._take(phase, step)
            self.phase = phase
            self._mark(phase, "entered")
        finally:
            self._entering.release()

    def _mark(self, phase: str, event: str) -> None:
        """Measure, and count peaks anew: those of a phase are not those of the way to it."""
        self.ledger.record(phase, event, self.present)
        self._device.reset_peak()

    def _agree(self, phase: str, wanted: Sequence[str]) -> Sequence[Step]:
        """The same steps on every rank, whatever each one has."""
        mine = {
            "phase": phase,
            "wanted": list(wanted),
            "together": self._together,
            "present": {name: resident.present for name, resident in self.residents.items()},
        }
        said = cast("Sequence[Mapping[str, Any]]", self._group.round("enter", mine, self._deadline()))
        asked = list(dict.fromkeys(one["phase"] for one in said))
        if len(asked) > 1:
            raise ConfigError(f"trainer ranks enter different phases: {[one['phase'] for one in said]}")
        self._order = list(dict.fromkeys(name for one in said for name in one["present"]))
        self._together = list(dict.fromkeys(tuple(some) for one in said for some in one["together"]))
        return self._steps(
            list(dict.fromkeys(name for one in said for name in one["wanted"])),
            [name for one in said for name, here in one["present"].items() if here],
            [name for one in said for name, here in one["present"].items() if not here],
        )

    def _steps(self, wanted: Sequence[str], present: Sequence[str], absent: Sequence[str]) -> Sequence[Step]:
        return transition(wanted, present=present, absent=absent, together=self._together, order=self._order)

    def _check(self, phase: str, steps: Sequence[Step], more: Mapping[str, int]) -> None:
        """Raise what would be raised in the middle, before anything moves."""
        for step in steps:
            resident = self.residents.get(step.resident)
            if resident is not None and resident.present == (step.action == "release"):
                (resident.check_release if resident.present else resident.check_restore)()
        leaving = [step.resident for step in steps if step.action == "release" and not self._is_away(step.resident)]
        if all(self._is_sized(name) for name in leaving):  # else only their going will tell
            self._admit(phase, [step for step in steps if step.action == "restore"], leaving, more)

    def _admit(self, phase: str, steps: Sequence[Step], leaving: Sequence[str], more: Mapping[str, int]) -> None:
        """Raise `AdmissionError` if what `steps` restore does not fit once `leaving` has left."""
        coming = [
            step.resident
            for step in steps
            if step.resident in leaving or step.resident not in self.residents or self._is_away(step.resident)
        ]
        admit(
            phase,
            self._device,
            coming={**{name: self._nbytes(name) for name in coming}, **more},
            leaving={name: self._nbytes(name) for name in leaving},
            staying={name: nbytes for name, nbytes in self.present.items() if name not in leaving},
            moved=[str(move.step) for move in self.moves] if self.phase is None else (),
        )

    def _take(self, phase: str, step: Step) -> None:
        before = self._device.room()
        self._everywhere(f"{step}: measured", lambda: None)
        began = time.monotonic()
        self._everywhere(str(step), lambda: self._act(step))
        seconds = time.monotonic() - began
        after = self._device.room()
        freed = after.free - before.free
        if step.resident and self._known(step.resident) is None:
            together = next((some for some in self._together if step.resident in some), (step.resident,))
            if step.action == "restore":
                self._measured[step.resident,] = -freed
            elif freed > 0:  # the first of those that leave together: the others find it done
                self._measured[together] = freed
        move = Move(
            phase=phase,
            step=step,
            seconds=seconds,
            freed=freed,
            freed_tensors=before.allocated - after.allocated,
        )
        self.moves.append(move)
        self.ledger.record_move(move)

    def _act(self, step: Step) -> None:
        resident = self.residents.get(step.resident)
        if step.action == "empty cache":
            self._device.empty_cache()
        elif resident is not None and resident.present == (step.action == "release"):
            (resident.release if step.action == "release" else resident.restore)(self._deadline())

    def _is_away(self, name: str) -> bool:
        """Whether it is this rank's and away. Of an engine that another rank owns a worker may be here."""
        return name in self.residents and not self.residents[name].present

    def _is_sized(self, name: str) -> bool:
        """Whether the bytes of a resident are known, or were measured, alone or with those that it leaves with."""
        return self._known(name) is not None or any(name in some for some in self._measured)

    def _known(self, name: str) -> int | None:
        """Bytes of a resident if it knows by itself."""
        return self.residents[name].nbytes if name in self.residents else None

    def _nbytes(self, name: str) -> int:
        """Bytes of a resident on this device, known or measured; 0 if neither."""
        return self._size(name) or 0

    def _size(self, name: str) -> int | None:
        known = self._known(name)
        if known is not None:
            return known
        if (name,) in self._measured:
            return self._measured[name,]
        for some in self._together:
            others = [self._measured.get((other,)) for other in some if other != name]
            if name in some and some in self._measured and None not in others:
                return max(self._measured[some] - sum(filter(None, others)), 0)
        return None

    def _everywhere(self, what: str, act: Callable[[], None]) -> None:
        self._group.local(what, act, Deadline.beyond(self._group.timeout_s))

    def _deadline(self) -> Deadline:
        return Deadline.after(self._group.timeout_s)
