"""The trainer ranks of one session, talking among themselves and never on the trainer's own groups.

Two channels. *Rounds* run over links with rank 0: every rank posts one message and reads everyone's, so a rank that
failed, went another way or never came is known by name. *Data* runs over a communicator of wsync's own; if it breaks,
the trainer's groups are untouched and the next sync builds a new one. The links end every wait as soon as a rank dies.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from wsync import wire
from wsync.background import Background
from wsync.deadline import Deadline
from wsync.device_transfers import DeviceTransfers, invite
from wsync.errors import PeerError, ProtocolError, RankError, UnsupportedError, WsyncError
from wsync.host_transfers import HostTransfers
from wsync.letters import Letters
from wsync.mailbox import Mailbox
from wsync.other_rank import OtherRank
from wsync.rank_links import At, RankLinks
from wsync.rank_zero import RankZero
from wsync.replies import first_line
from wsync.transfers import Messages, Transfers

T = TypeVar("T")


_LOOK_S = 0.5
"""How often a rank looks there for the words of those that it has not met."""


class Group:
    """Host-side rounds, and a data communicator of wsync's own.

    Attributes:
        rank: this trainer rank.
        world_size: number of trainer ranks; 1 makes every method local.
        timeout_s: longest wait, in seconds, for other ranks in one transfer.
        call: number of the collective call; the same on every rank once a round of it has succeeded.
        letters: what this rank has left in the store; None in a world of one.
    """

    def __init__(self, rank: int, world_size: int, store: Store | None, timeout_s: float) -> None:
        """Local. `store` is private to this session (already prefixed); None only for a world of one."""
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self.timeout_s = timeout_s
        self.call = 0
        self._step = 0
        self._posted: At | None = None
        self._transfers: Transfers | None = None
        self.letters = Letters(Mailbox(store), rank, world_size) if store is not None else None
        self._links: RankLinks = OtherRank(rank, world_size, store) if rank else RankZero(world_size, store)
        if world_size > 1:
            weakref.finalize(self, _close, self._links).atexit = False  # an exit without close is a death to the others

    def enter(self) -> None:
        """Begin the next collective call. See `call`.

        A call that began without some rank is over for that rank too: it meets the others again in their next one.
        """
        self.call = max(self.call, self._links.over) + 1
        self._step = 0

    def round(self, phase: str, message: object, deadline: Deadline) -> list[object]:
        """Every rank's `message` (msgpack-able), by rank.

        Raises:
            RankError: a rank did not come before `deadline`, reported a failure, or is in another phase.
        """
        replies = self._exchange(phase, {"phase": phase, "message": message, "error": None}, deadline)
        return [reply["message"] for reply in replies]

    def gather(self, phase: str, make: Callable[[], object], deadline: Deadline) -> list[object]:
        """`round` of what `make()` returns on each rank; if it raises here, the others hear why."""
        return self.round(phase, self.reported(phase, make), deadline)

    def local(self, phase: str, make: Callable[[], T], deadline: Deadline) -> T:
        """What `make()` returns on this rank, once it has succeeded on every rank."""
        result = self.reported(phase, make)
        self.round(phase, None, deadline)
        return result

    def reported(self, phase: str, make: Callable[[], T]) -> T:
        """What `make()` returns, at once; if it raises here, the others hear why in place of the next message."""
        try:
            return make()
        except Exception as error:
            self.report(phase, error)
            raise

    def agree(self, phase: str, error: BaseException | None, deadline: Deadline) -> None:
        """Go/stop. Raises this rank's `error` after the others heard of it, or `RankError` naming who reported one."""
        if error is None:
            self.round(phase, None, deadline)
            return
        self.report(phase, error)
        raise error

    def report(self, phase: str, error: BaseException) -> None:
        """Post `error` in place of this rank's next message and wait for nobody's. Never raises.

        It also lies in the store, for those whom this rank has not met, or who come when it is gone.
        """
        if self.world_size > 1:
            # Rank 0 or the store may be gone: the others find that out themselves.
            words = type(error).__name__
            with suppress(Exception):
                words = f"{words}: {error}"
            with suppress(Exception):
                if not self._step:
                    self.call = max(self.call, self._links.over + 1)
                self._step += self._posted == self._at  # interrupted in a round: its message has been told, perhaps
                self._post({"phase": phase, "message": None, "error": words})
            with suppress(Exception):
                self._letters().leave(self.call, words, error)

    def blame(self, error: BaseException) -> None:
        """Raise `RankError` from a `PeerError` of which another rank may be the cause: it died, or failed by itself.

        A peer that serves several ranks hears that one of them is gone, and not why.
        """
        if isinstance(error, PeerError) and self.world_size > 1:
            if self._links.lost:
                raise self._death(sorted(self._links.lost), f"in wsync call {self.call}") from error
            reasons = self._letters().reasons(self.call)
            if reasons:
                heard = f"this rank heard of it as {type(error).__name__}: {first_line(error)}"
                raise RankError(f"{_said(reasons)}; {heard}", list(reasons)) from error

    def transfer(
        self,
        sends: Messages,
        receives: Messages,
        deadline: Deadline,
    ) -> None:
        """Point-to-point in one batch. In host memory all of it is done on return, on a device it is queued.

        The first transfer after `reset` connects all ranks: each of them must make it, if only to itself.

        Raises:
            RankError: a rank died, or failed by itself; the communicator is dropped.
            TransportError: a peer closed the connection; the communicator is dropped.
            SyncTimeout: not done before `deadline`; the communicator is dropped.
        """
        if not sends and not receives:
            return
        device = (sends or receives)[0][1].device
        with self._dropped_if_broken():
            if self._transfers is None:
                self._transfers = self._meet(device, deadline)
            self._transfers.run(sends, receives, deadline)

    def settle(self, deadline: Deadline) -> None:
        """Wait until what was transferred is there, on devices too. Raises as `transfer`."""
        if self._transfers is not None:
            with self._dropped_if_broken():
                self._transfers.settle(deadline)

    def reset(self) -> None:
        """Drop the data communicator, and what it takes of a device. The next transfer builds one: see there."""
        transfers, self._transfers = self._transfers, None
        if transfers is not None:
            transfers.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._links.closed

    def close(self) -> None:
        """Drop the communicator and hang up."""
        self.reset()
        self._links.close()

    def _exchange(self, phase: str, envelope: dict[str, object], deadline: Deadline) -> list[dict[str, object]]:
        if self.world_size == 1:
            return [envelope]
        links = self._links
        try:
            self._post(envelope)
        except WsyncError as error:
            self.report(phase, error)
            raise
        while (messages := links.take(self._at)) is None:
            if links.late(self._at):
                self.enter()
                self._post(envelope)
                continue
            missing, trouble = self._missing(deadline), links.trouble
            absent = links.absent(self._at) or missing
            if links.take(self._at) is not None:
                continue  # it came before what is wrong now, as an end came before the good-bye of who gave up
            if absent:
                raise self._without(absent, phase, deadline)
            if trouble:
                words = self._letters().words(self.call, [0])
                raise _stopped(phase, words) if words else trouble
        self._step += 1
        if self.letters is not None:
            self.letters.withdraw(self.call)
        replies = [_opened(rank, message) for rank, message in enumerate(messages)]
        self._check(phase, replies)
        return replies

    def _missing(self, deadline: Deadline) -> Sequence[int]:
        """Wait for everybody's message. Ranks whose message is missing at the deadline, or will never come.

        None are if something else has settled the round.
        """
        links, at, known = self._links, self._at, 0

        def news() -> bool:
            return links.settled(at) or len(links.gone) > known

        while (left_s := deadline.expires - time.monotonic()) > 0:
            unmet = links.unmet
            if links.wait_for(news, min(left_s, _LOOK_S) if unmet else left_s):
                if links.settled(at):
                    return []
                known = len(links.gone)
                if never := sorted(links.gone.intersection(links.missing(at))):
                    return never  # others may be slower
            elif unmet and (failed := self._letters().words(self.call, unmet)):
                return list(failed)
        return links.missing(at)

    def _without(self, absent: Sequence[int], phase: str, deadline: Deadline) -> RankError:
        """What to raise as `absent` do not come, once the others know."""
        words = self._letters().words(self.call, absent)
        error = _stopped(phase, words) if words else self._absence(phase, absent, deadline)
        if not self._step:
            self._links.give_over(self.call, absent)
        self._step += 1
        self.report(phase, error)
        return error

    def _absence(self, phase: str, missing: Sequence[int], deadline: Deadline) -> RankError:
        dead = sorted(set(missing).intersection(self._links.lost))
        if dead:
            return self._death(dead, f"before phase {phase!r} of wsync call {self.call}")
        closed = sorted(set(missing).intersection(self._links.left))
        if closed:
            return RankError(f"trainer rank(s) {closed} closed their session before phase {phase!r}", closed)
        obstacle = f". Of rank 0 it is known that {self._links.obstacle}" if self._links.obstacle else ""
        return RankError(
            f"trainer rank(s) {list(missing)} did not reach phase {phase!r} of wsync call {self.call} within "
            f"{deadline.timeout_s:g} s; this is rank {self.rank} of {self.world_size}. "
            f"Every rank must call wsync in the same order{obstacle}",
            missing,
        )

    def _death(self, dead: Sequence[int], when: str) -> RankError:
        return RankError(
            f"trainer rank(s) {list(dead)} died {when}: its process ended, or its host cannot be reached; this is rank "
            f"{self.rank} of {self.world_size}. Start the trainer again",
            dead,
        )

    def _check(self, phase: str, replies: Sequence[dict[str, object]]) -> None:
        failed = {rank: reply["error"] for rank, reply in enumerate(replies) if reply["error"] is not None}
        if failed:
            raise _stopped(phase, failed)
        strayed = {rank: reply["phase"] for rank, reply in enumerate(replies) if reply["phase"] != phase}
        if strayed:
            raise RankError(
                f"trainer ranks diverged: rank {self.rank} is in phase {phase!r}, others are in {strayed}; "
                f"every rank must make the same wsync calls in the same order",
                list(strayed),
            )

    def _post(self, envelope: dict[str, object]) -> None:
        self._links.start(self._letters().mailbox)
        self._links.post(self._at, wire.pack(envelope))
        self._posted = self._at

    @property
    def _at(self) -> At:
        return self.call, self._step

    def _letters(self) -> Letters:
        self._private_store()
        assert self.letters is not None
        return self.letters

    def _private_store(self) -> Store:
        if self._store is None:
            raise UnsupportedError(
                f"a session of {self.world_size} trainer ranks needs a store; pass store= to connect"
            )
        return self._store

    def _meet(self, device: torch.device, deadline: Deadline) -> Transfers:
        """*Collective.* The data communicator for shards on `device`."""
        group = weakref.ref(self)  # one that is dropped without close takes its communicator along

        def death(what: str) -> RankError:
            here = group()
            assert here is not None  # it waits
            return here._death(sorted(here._links.lost), f"during {what}")

        def check() -> None:
            if (here := group()) is not None and here._links.lost:
                raise death("a transfer")

        def listen() -> None:
            if (here := group()) is not None and (words := here._letters().heard(here.call)):
                raise RankError(f"stopped in the middle of a transfer: {_said(words)}", list(words))

        if device.type == "cpu":
            shared: Any = self._private_store()
            store = PrefixStore(f"data/{self.call}", shared.clone())  # a wait on it must not block the trainer's
            return HostTransfers(self.rank, self.world_size, store, self.timeout_s, self._links, death, listen)
        said = self.gather("invite", lambda: invite(self.rank, device), deadline)
        invitations = cast("Sequence[Mapping[str, Any]]", said)
        return DeviceTransfers(invitations, self.rank, device, check, listen, deadline)

    @contextmanager
    def _dropped_if_broken(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.reset()
            raise


def _stopped(phase: str, words: Mapping[int, object]) -> RankError:
    return RankError(f"stopped before phase {phase!r}: {_said(words)}", list(words))


def _said(words: Mapping[int, object]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in words.items())


def _opened(rank: int, message: bytes) -> dict[str, object]:
    envelope = wire.unpack(message)
    if not isinstance(envelope, dict) or envelope.keys() != {"phase", "message", "error"}:
        raise ProtocolError(f"trainer rank {rank} posted something that is not a wsync round message")
    return cast("dict[str, object]", envelope)


def _close(links: RankLinks) -> None:
    """Whoever collects garbage may be in the middle of a message over these links."""
    Background("the links between trainer ranks to end", links.close)
