"""The trainer ranks of one session, talking among themselves and never on the trainer's own groups.

Two channels. *Rounds* run over a key-value store: every rank posts one small message and reads everyone's, so a rank
that failed, went another way or never came is known by name. *Data* runs over a communicator of wsync's own; if it
breaks, the trainer's groups are untouched and the next sync builds a new one. Beside them lifelines, made by the first
round, end every wait as soon as a rank dies.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from wsync import wire
from wsync.background import Background
from wsync.deadline import Deadline
from wsync.errors import ProtocolError, RankError, SyncTimeout, TransportError, UnsupportedError
from wsync.lifelines import Lifelines
from wsync.protocols import Ticket

T = TypeVar("T")

_STORE_VALUE_BYTES = 4 << 20
"""Longer messages are cut: TCPStore drops a client that sends more than 8 MiB in one value."""

_GRACE_S = 1.0
"""How much longer a transfer's own thread is waited for, so that its words come through."""


class Group:
    """Host-side rounds over a key-value store, and a data communicator of wsync's own.

    Attributes:
        rank: this trainer rank.
        world_size: number of trainer ranks; 1 makes every method local.
        timeout_s: longest wait, in seconds, for other ranks in one transfer.
    """

    def __init__(self, rank: int, world_size: int, store: Store | None, timeout_s: float) -> None:
        """Local. `store` is private to this session (already prefixed); None only for a world of one."""
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self.timeout_s = timeout_s
        self._epoch = 0
        self._step = 0
        self._previous_keys: list[str] = []
        self._data: dist.ProcessGroup | None = None
        self._waits: Store | None = None
        self._lifelines = Lifelines(rank, world_size)
        weakref.finalize(self, self._lifelines.close).atexit = False  # an exit without close is a death to the others

    def enter(self) -> int:
        """Begin the next collective call, and return its number.

        A call that began without some rank is over for that rank too: it meets the others again in their next one.
        """
        self._epoch += 1
        self._step = 0
        while self.world_size > 1 and self._private_store().check([self._over(self._epoch)]):
            self._epoch += 1
        return self._epoch

    def round(self, phase: str, message: object, deadline: Deadline) -> list[object]:
        """Every rank's `message` (msgpack-able), by rank.

        Raises:
            RankError: a rank did not come before `deadline`, reported a failure, or is in another phase.
        """
        replies = self._exchange(phase, {"phase": phase, "message": message, "error": None}, deadline)
        return [reply["message"] for reply in replies]

    def gather(self, phase: str, make: Callable[[], object], deadline: Deadline) -> list[object]:
        """`round` of what `make()` returns on each rank; if it raises here, the others hear why."""
        return self.round(phase, self._reported(phase, make), deadline)

    def local(self, phase: str, make: Callable[[], T], deadline: Deadline) -> T:
        """What `make()` returns on this rank, once it has succeeded on every rank."""
        result = self._reported(phase, make)
        self.round(phase, None, deadline)
        return result

    def agree(self, phase: str, error: BaseException | None, deadline: Deadline) -> None:
        """Go/stop. Raises this rank's `error` after the others heard of it, or `RankError` naming who reported one."""
        if error is None:
            self.round(phase, None, deadline)
            return
        self.report(phase, error)
        raise error

    def report(self, phase: str, error: BaseException) -> None:
        """Post `error` in place of this rank's next message and wait for nobody. Never raises."""
        if self.world_size > 1:
            with suppress(RuntimeError, ProtocolError):  # the store is gone: the others find that out themselves
                self._post({"phase": phase, "message": None, "error": f"{type(error).__name__}: {error}"})

    def transfer(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
        deadline: Deadline,
    ) -> None:
        """Point-to-point in one batch: (peer rank, contiguous tensor). Returns when all of it is done.

        The first transfer after `reset` connects all ranks: each of them must make it, if only to itself.

        Raises:
            RankError: a rank died; the communicator is dropped.
            TransportError: a peer closed the connection; the communicator is dropped.
            SyncTimeout: not done before `deadline`; the communicator is dropped.
        """
        if not sends and not receives:
            return
        peers = sorted({peer for peer, _ in (*sends, *receives)})
        waiting_for = f"trainer ranks {peers}"
        sample = sends[0][1] if sends else receives[0][1]
        current, store, name = self._data, self._private_store(), f"data/{self._epoch}"

        def move() -> dist.ProcessGroup:
            data = current or self._communicator(sample, store, name)
            works = [data.recv([tensor], peer, 0) for peer, tensor in receives if tensor.numel()]
            works += [data.send([tensor], peer, 0) for peer, tensor in sends if tensor.numel()]
            for work in works:
                work.wait(timedelta(seconds=deadline.remaining(waiting_for)))
            return data

        self._data = self._await(Background(f"the transfer with {waiting_for}", move), deadline)

    def reset(self) -> None:
        """Drop the data communicator. The next transfer builds one, which every rank must then do."""
        self._data = None

    def close(self) -> None:
        """Drop the communicator. The last messages stay in the store: another rank may still be reading them."""
        self.reset()
        self._lifelines.close()

    def _reported(self, phase: str, make: Callable[[], T]) -> T:
        try:
            return make()
        except Exception as error:
            self.report(phase, error)
            raise

    def _exchange(self, phase: str, envelope: dict[str, object], deadline: Deadline) -> list[dict[str, object]]:
        if self.world_size == 1:
            return [envelope]
        store = self._private_store()
        step = self._step
        if not (step or self.rank):
            envelope["link"] = self._lifelines.invite(store)
        mine = self._post(envelope)
        heads = [self._key(step, rank) for rank in range(self.world_size)]
        missing = self._wait(store, heads, deadline)
        if missing:
            error = self._absence(phase, missing, deadline)
            if not step:
                store.set(self._over(self._epoch), "")
            self._step += 1
            self.report(phase, error)
            raise error
        replies = [self._read(step, rank) for rank in range(self.world_size)]
        self._forget()
        self._previous_keys = mine
        self._step += 1
        invitation = replies[0].get("link")
        if self.rank and isinstance(invitation, Ticket):
            self._lifelines.join(invitation)
        self._check(phase, replies)
        return replies

    def _wait(self, store: Store, heads: Sequence[str], deadline: Deadline) -> list[int]:
        """Wait for every rank's message. Returns the ranks whose message is missing at the deadline, or for ever."""
        if not (missing := self._missing(store, heads)):
            return []
        # On a connection of its own: a wait that a death leaves behind must not block this rank's next message.
        waits = self._waits or cast("Any", store).clone()
        self._waits = None
        left = timedelta(seconds=deadline.remaining("other trainer ranks"))
        call = Background("other trainer ranks", lambda: waits.wait(list(heads), left))
        call.add_done_callback(self._lifelines.notify)
        known = 0
        while not call.done and self._lifelines.wait(lambda: call.done, left.total_seconds() + _GRACE_S, known):
            known = len(self._lifelines.lost)
            missing = self._missing(store, heads)
            if set(missing).intersection(self._lifelines.lost):
                return missing
        try:
            call.result(Deadline.after(_GRACE_S))
        except (RuntimeError, SyncTimeout):  # what a wait that was too long raises depends on the store
            return self._missing(store, heads)
        self._waits = waits
        return []

    def _missing(self, store: Store, heads: Sequence[str]) -> list[int]:
        try:
            if store.check(list(heads)):
                return []
            return [rank for rank, head in enumerate(heads) if not store.check([head])]
        except RuntimeError as error:
            raise TransportError(
                f"rank {self.rank}: the store that connects the trainer ranks is gone: {error}"
            ) from error

    def _absence(self, phase: str, missing: Sequence[int], deadline: Deadline) -> RankError:
        dead = sorted(set(missing).intersection(self._lifelines.lost))
        if dead:
            return self._death(dead, f"before phase {phase!r} of wsync call {self._epoch}")
        return RankError(
            f"trainer rank(s) {missing} did not reach phase {phase!r} of wsync call {self._epoch} within "
            f"{deadline.timeout_s:g} s; this is rank {self.rank} of {self.world_size}. "
            f"Every rank must call wsync in the same order",
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
            words = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise RankError(f"stopped before phase {phase!r}: {words}", list(failed))
        strayed = {rank: reply["phase"] for rank, reply in enumerate(replies) if reply["phase"] != phase}
        if strayed:
            raise RankError(
                f"trainer ranks diverged: rank {self.rank} is in phase {phase!r}, others are in {strayed}; "
                f"every rank must make the same wsync calls in the same order",
                list(strayed),
            )

    def _post(self, envelope: dict[str, object]) -> list[str]:
        store = self._private_store()
        data = wire.pack(envelope)
        parts = [data[start : start + _STORE_VALUE_BYTES] for start in range(0, len(data), _STORE_VALUE_BYTES)]
        head = self._key(self._step, self.rank)
        keys = [f"{head}/{index}" for index in range(len(parts))]
        for key, part in zip(keys, parts, strict=True):
            store.set(key, cast("str", part))  # bytes are taken as they are; torch's stub says str
        store.set(head, str(len(parts)))  # last: whoever sees the head finds every part
        return [head, *keys]

    def _read(self, step: int, rank: int) -> dict[str, object]:
        store = self._private_store()
        head = self._key(step, rank)
        parts = int(store.get(head))
        envelope = wire.unpack(b"".join(store.multi_get([f"{head}/{index}" for index in range(parts)])))
        if not isinstance(envelope, dict) or envelope.keys() - {"link"} != {"phase", "message", "error"}:
            raise ProtocolError(f"trainer rank {rank} posted something that is not a wsync round message")
        return cast("dict[str, object]", envelope)

    def _forget(self) -> None:
        """Delete this rank's previous messages: everyone who is in a later round has read them."""
        if self._previous_keys:
            store = self._private_store()
            for key in self._previous_keys:
                store.delete_key(key)
            self._previous_keys = []

    def _key(self, step: int, rank: int) -> str:
        return f"{self._epoch}/{step}/{rank}"

    @staticmethod
    def _over(epoch: int) -> str:
        return f"{epoch}/over"

    def _private_store(self) -> Store:
        if self._store is None:
            raise UnsupportedError(
                f"a session of {self.world_size} trainer ranks needs a store; pass store= to connect"
            )
        return self._store

    def _communicator(self, sample: torch.Tensor, store: Store, name: str) -> dist.ProcessGroup:
        if sample.device.type != "cpu":
            raise UnsupportedError(
                f"gathering shards on {sample.device} is not supported yet; trainer shards must be on the CPU"
            )
        store = PrefixStore(name, store)
        gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, timedelta(seconds=self.timeout_s))
        boxed = dist.ProcessGroup(store, self.rank, self.world_size)
        boxed._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return boxed

    def _await(self, call: Background[dist.ProcessGroup], deadline: Deadline) -> dist.ProcessGroup:
        """The communicator that `call` used. A transfer that broke, or that a death leaves hanging, is left behind."""
        lifelines = self._lifelines
        call.add_done_callback(lifelines.notify)
        try:
            lifelines.wait(lambda: call.done, deadline.remaining(call.name) + _GRACE_S)
            if not call.done and lifelines.lost:
                raise self._death(sorted(lifelines.lost), f"during {call.name}")
            return call.result(deadline.restart() if call.done else deadline)
        except (SyncTimeout, RankError, UnsupportedError):
            self.reset()
            raise
        except RuntimeError as error:
            self.reset()
            if lifelines.wait(lambda: False, _GRACE_S):
                raise self._death(sorted(lifelines.lost), f"during {call.name}") from error
            raise TransportError(
                f"rank {self.rank}: {call.name} broke or passed its deadline of {deadline.timeout_s:g} s: {error}"
            ) from error
