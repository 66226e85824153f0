"""The trainer ranks of one session, talking among themselves and never on the trainer's own groups.

Two channels. *Rounds* run over a key-value store: every rank posts one small message and reads everyone's, so a rank
that failed, went another way or never came is known by name. *Data* runs over a communicator of wsync's own; if it
breaks, the trainer's groups are untouched and the next sync builds a new one.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from wsync import wire
from wsync.deadline import Deadline
from wsync.errors import ProtocolError, RankError, SyncTimeout, TransportError, UnsupportedError

T = TypeVar("T")

_STORE_VALUE_BYTES = 4 << 20
"""Longer messages are cut: TCPStore drops a client that sends more than 8 MiB in one value."""


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
            TransportError: a peer closed the connection; the communicator is dropped.
            SyncTimeout: not done before `deadline`; the communicator is dropped.
        """
        if not sends and not receives:
            return
        data = self._communicator(sends[0][1] if sends else receives[0][1])
        works = [data.recv([tensor], peer, 0) for peer, tensor in receives if tensor.numel()]
        works += [data.send([tensor], peer, 0) for peer, tensor in sends if tensor.numel()]
        peers = sorted({peer for peer, _ in (*sends, *receives)})
        self._finish(works, f"trainer ranks {peers}", deadline)

    def reset(self) -> None:
        """Drop the data communicator. The next transfer builds one, which every rank must then do."""
        self._data = None

    def close(self) -> None:
        """Drop the communicator. The last messages stay in the store: another rank may still be reading them."""
        self.reset()

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
        mine = self._post(envelope)
        step = self._step
        heads = [self._key(step, rank) for rank in range(self.world_size)]
        missing = self._wait(store, heads, deadline)
        if missing:
            error = RankError(
                f"trainer rank(s) {missing} did not reach phase {phase!r} of wsync call {self._epoch} within "
                f"{deadline.timeout_s:g} s; this is rank {self.rank} of {self.world_size}. "
                f"Every rank must call wsync in the same order",
                missing,
            )
            if not step:
                store.set(self._over(self._epoch), "")
            self._step += 1
            self.report(phase, error)
            raise error
        replies = [self._read(step, rank) for rank in range(self.world_size)]
        self._forget()
        self._previous_keys = mine
        self._step += 1
        self._check(phase, replies)
        return replies

    def _wait(self, store: Store, heads: Sequence[str], deadline: Deadline) -> list[int]:
        """Wait for every rank's message. Returns the ranks whose message is not there at the deadline."""
        try:
            store.wait(list(heads), timedelta(seconds=deadline.remaining("other trainer ranks")))
        except (RuntimeError, SyncTimeout) as error:  # what a wait that was too long raises depends on the store
            try:
                return [rank for rank, head in enumerate(heads) if not store.check([head])]
            except RuntimeError:
                raise TransportError(
                    f"rank {self.rank}: the store that connects the trainer ranks is gone: {error}"
                ) from error
        return []

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
        if not isinstance(envelope, dict) or envelope.keys() != {"phase", "message", "error"}:
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

    def _communicator(self, sample: torch.Tensor) -> dist.ProcessGroup:
        if self._data is None:
            if sample.device.type != "cpu":
                raise UnsupportedError(
                    f"gathering shards on {sample.device} is not supported yet; trainer shards must be on the CPU"
                )
            store = PrefixStore(f"data/{self._epoch}", self._private_store())
            gloo = dist.ProcessGroupGloo(store, self.rank, self.world_size, timedelta(seconds=self.timeout_s))
            boxed = dist.ProcessGroup(store, self.rank, self.world_size)
            boxed._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            self._data = boxed
        return self._data

    def _finish(self, works: Sequence[dist.Work], waiting_for: str, deadline: Deadline) -> None:
        try:
            for work in works:
                work.wait(timedelta(seconds=deadline.remaining(waiting_for)))
        except SyncTimeout:
            self.reset()
            raise
        except RuntimeError as error:
            self.reset()
            raise TransportError(
                f"rank {self.rank}: the data transfer with {waiting_for} broke or passed its deadline of "
                f"{deadline.timeout_s:g} s: {error}"
            ) from error
