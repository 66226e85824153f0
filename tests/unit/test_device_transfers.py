"""Tensors between ranks over a stand-in for NCCL that moves real bytes: order, partners that differ, and failures."""

import ctypes
import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import pytest
import torch

from wsync import device_transfers
from wsync.background import Background
from wsync.deadline import Deadline
from wsync.device_transfers import DeviceTransfers, Introduction, compare, introduce, invite
from wsync.errors import ConfigError, ProtocolError, RankError, SyncTimeout, TransportError, UnsupportedError
from wsync.transports.nccl_library import IN_PROGRESS, KEY_BYTES, SUCCESS

DEVICES = [torch.device("cuda", index) for index in range(3)]
REMOTE_ERROR = 6
PATIENCE_S = 20.0


class Wires:
    """What goes from one rank to another, in order."""

    def __init__(self) -> None:
        self.queues = defaultdict[tuple[int, int], "SimpleQueue[bytes]"](SimpleQueue)


class Library:
    """NCCL for one rank: what a group asks for moves in the background, once the group has ended.

    Attributes:
        failure: what a communicator's state is from now on, if not `SUCCESS`.
        aborted: how often a communicator was.
    """

    def __init__(self, wires: Wires) -> None:
        self.wires, self.rank = wires, 0
        self.asked: list[Callable[[], bool]] = []
        self.running: list[Callable[[], bool]] = []
        self.failure = SUCCESS
        self.aborted = 0

    def begin(self, key: bytes, rank: int, size: int) -> tuple[int, int]:
        assert len(key) == KEY_BYTES
        self.rank = rank
        return IN_PROGRESS, 7

    def state(self, communicator: int) -> int:
        return self.failure

    def start_group(self) -> int:
        assert not self.asked
        return SUCCESS

    def send(self, communicator: int, peer: int, start: int, nbytes: int, stream: int) -> int:
        self.asked.append(partial(self._sent, peer, start, nbytes))
        return SUCCESS

    def receive(self, communicator: int, peer: int, start: int, nbytes: int, stream: int) -> int:
        self.asked.append(partial(self._received, peer, start, nbytes))
        return SUCCESS

    def end_group(self) -> int:
        self.running, self.asked = [*self.running, *self.asked], []
        return IN_PROGRESS

    def abort(self, communicator: int) -> None:
        self.aborted += 1

    def words(self, code: int, communicator: int) -> str:
        return f"code {code}"

    def run(self) -> bool:
        """Go on with what was asked for. Whether all of it is done."""
        while self.running and self.running[0]():
            del self.running[0]
        return not self.running

    def _sent(self, peer: int, start: int, nbytes: int) -> bool:
        self.wires.queues[self.rank, peer].put(ctypes.string_at(start, nbytes))
        return True

    def _received(self, peer: int, start: int, nbytes: int) -> bool:
        try:
            data = self.wires.queues[peer, self.rank].get_nowait()
        except Empty:
            return False
        assert len(data) == nbytes
        ctypes.memmove(start, data, nbytes)
        return True


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[Library]:
    """One for each rank, which is a thread; devices have their index for a UUID."""
    wires = Wires()
    found = [Library(wires) for _ in DEVICES]
    mine = threading.local()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        mine.index = device.index
        yield

    class Event:
        def record(self, stream: object) -> None:
            self.library = found[mine.index]

        def query(self) -> bool:
            done: bool = self.library.run()
            return done

    class Stream:
        cuda_stream = 3

    for name, value in {"device": on, "Event": Event, "current_stream": lambda device: Stream()}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(device_transfers, "load", lambda: found[getattr(mine, "index", 0)])
    monkeypatch.setattr(device_transfers, "uuid_of", lambda device: f"uuid {device.index}")
    monkeypatch.setattr(device_transfers, "environment", lambda: {"NCCL's version": "2.28.9"})
    monkeypatch.setattr(device_transfers, "make_key", lambda: bytes(KEY_BYTES))
    return found


def transfers_of(
    rank: int, size: int, check: Callable[[], None] = lambda: None, listen: Callable[[], None] = lambda: None
) -> DeviceTransfers:
    invitations = [invite(other, DEVICES[other]) for other in range(size)]
    return DeviceTransfers(invitations, rank, DEVICES[rank], check, listen, Deadline.after(PATIENCE_S))


def together(work: Callable[[int], object], size: int) -> list[object]:
    deadline = Deadline.after(PATIENCE_S)
    ranks = [Background(f"rank {rank}", partial(work, rank)) for rank in range(size)]
    return [rank.result(deadline) for rank in ranks]


def tensor(rank: int, number: int) -> torch.Tensor:
    return torch.rand(257, generator=torch.Generator().manual_seed(10 * rank + number))


def test_every_message_arrives_where_it_belongs_in_the_order_of_its_pair(libraries: list[Library]) -> None:
    def exchange(rank: int) -> bool:
        transfers, deadline = transfers_of(rank, 3), Deadline.after(PATIENCE_S)
        for turn in range(2):
            others = [other for other in range(3) if other != rank]
            sends = [(other, tensor(rank, 4 * turn + other)) for other in others for _ in range(2)]
            empty = [(rank, torch.empty(0))]
            received = [(other, torch.empty(257)) for other in others for _ in range(2)]
            transfers.run([*sends, *empty], received, deadline)
            transfers.settle(deadline)
            assert all(torch.equal(got, tensor(other, 4 * turn + rank)) for other, got in received)
        transfers.close()
        return True

    assert together(exchange, 3) == [True] * 3
    assert [library.aborted for library in libraries] == [1, 1, 1]


def test_a_rank_with_nothing_to_say_takes_part(libraries: list[Library]) -> None:
    transfers = transfers_of(0, 2)
    transfers.run([(0, torch.empty(0))], [], Deadline.after(PATIENCE_S))
    transfers.settle(Deadline.after(PATIENCE_S))


def test_who_waits_hears_of_a_death(libraries: list[Library]) -> None:
    deaths: list[RankError] = []

    def check() -> None:
        for death in deaths:
            raise death

    transfers = transfers_of(0, 2, check)
    transfers.run([], [(1, torch.empty(8))], Deadline.after(PATIENCE_S))
    deaths.append(RankError("rank 1 died", [1]))
    with pytest.raises(RankError, match="rank 1 died"):
        transfers.settle(Deadline.after(PATIENCE_S))


def test_who_waits_hears_of_a_failure_though_not_at_every_look(
    libraries: list[Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_transfers, "LOOK_S", 0.05)
    asked: list[float] = []

    def listen() -> None:
        asked.append(time.monotonic())
        if len(asked) == 3:
            raise RankError("rank 1: ValueError", [1])

    transfers = transfers_of(0, 2, listen=listen)
    transfers.run([], [(1, torch.empty(8))], Deadline.after(PATIENCE_S))
    began = time.monotonic()
    with pytest.raises(RankError, match="rank 1: ValueError"):
        transfers.settle(Deadline.after(PATIENCE_S))
    assert all(moment - began >= 0.05 * (number + 1) for number, moment in enumerate(asked))


def test_who_waits_gives_up_at_the_deadline(libraries: list[Library]) -> None:
    transfers = transfers_of(0, 2)
    transfers.run([], [(1, torch.empty(8))], Deadline.after(PATIENCE_S))
    with pytest.raises(SyncTimeout, match="exchange their shards over NCCL"):
        transfers.settle(Deadline.after(0.05))


def test_nccl_s_own_failure_is_an_error(libraries: list[Library]) -> None:
    transfers = transfers_of(0, 2)
    transfers.run([], [(1, torch.empty(8))], Deadline.after(PATIENCE_S))
    libraries[0].failure = REMOTE_ERROR
    with pytest.raises(TransportError, match="what was queued failed: code 6"):
        transfers.settle(Deadline.after(PATIENCE_S))
    with pytest.raises(TransportError, match="what was queued failed: code 6"):
        transfers.run([], [], Deadline.after(PATIENCE_S))


def test_a_communicator_that_is_dropped_is_given_back(libraries: list[Library]) -> None:
    transfers, patience = transfers_of(0, 2), Deadline.after(PATIENCE_S)
    del transfers
    gc.collect()
    while not libraries[0].aborted:
        patience.remaining("the communicator to end")


def refused(*invitations: Introduction) -> str:
    with pytest.raises((ConfigError, ProtocolError)) as caught:
        DeviceTransfers(invitations, 0, DEVICES[0], lambda: None, lambda: None, Deadline.after(PATIENCE_S))
    return str(caught.value)


def test_what_could_not_work_is_refused_before_a_communicator_is_made(libraries: list[Library]) -> None:
    first, second = invite(0, DEVICES[0]), invite(1, DEVICES[1])
    assert "ranks 0 and 1 have their shards on one device, uuid 0" in refused(first, invite(1, DEVICES[0]))
    unlike = {**second, "environment": {"NCCL's version": "2.28.9", "NCCL_ALGO": "Ring"}}
    assert "NCCL_ALGO is not set at trainer rank 0 and 'Ring' at trainer rank 1" in refused(first, unlike)
    assert "posted no key" in refused({**first, "key": b""}, second)
    assert not any(library.aborted for library in libraries)


def test_ranks_that_are_right_hear_what_is_wrong_between_others(libraries: list[Library]) -> None:
    first, second, third = (introduce(DEVICES[index]) for index in (0, 1, 1))
    with pytest.raises(ConfigError, match="ranks 1 and 2 have their shards on one device"):
        compare([first, second, third])
    unlike = {**introduce(DEVICES[2]), "environment": {"NCCL's version": "2.29.7"}}
    with pytest.raises(
        ConfigError, match=r"NCCL's version is '2\.28\.9' at trainer rank 0 and '2\.29\.7' at trainer rank 2"
    ):
        compare([first, second, unlike])


def test_shards_elsewhere_are_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="shards on cpu and on other ranks' CUDA devices"):
        introduce(torch.device("cpu"))

    def load() -> Any:
        raise UnsupportedError("libnccl.so.2 cannot be used in this process")

    monkeypatch.setattr(device_transfers, "load", load)
    with pytest.raises(UnsupportedError, match=r"libnccl\.so\.2"):
        introduce(DEVICES[0])


def test_only_rank_zero_makes_a_key(libraries: list[Library]) -> None:
    keys: Sequence[bytes] = [invite(rank, DEVICES[rank])["key"] for rank in range(2)]
    assert [len(key) for key in keys] == [KEY_BYTES, 0]
