"""NCCL without a GPU: who is served, what both sides must have in common, and a communicator over a stand-in."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from wsync.errors import ConfigError, ProtocolError, SyncTimeout, TransportError, UnsupportedError
from wsync.topology import CPU, Endpoint, Topology, local_endpoint
from wsync.transports import nccl, nccl_library
from wsync.transports.board import Board
from wsync.transports.collective import NcclTransport
from wsync.transports.collective_group import Seat
from wsync.transports.nccl import NcclBackend, meet
from wsync.transports.nccl_communicator import Communicator
from wsync.transports.nccl_environment import ALIKE, differences, fingerprint
from wsync.transports.nccl_library import IN_PROGRESS, KEY_BYTES, SUCCESS, Library

UUIDS = ("aaaa", "bbbb", "cccc")
REMOTE_ERROR = 6


class FakeLibrary:
    """Gives the codes that it is told, then `SUCCESS`; notes what was called."""

    def __init__(self, first: int = SUCCESS, states: Sequence[int] = (), address: int = 7) -> None:
        self.first, self.states, self.address = first, list(states), address
        self.called: list[str] = []
        self.sent = SUCCESS

    def version(self) -> str:
        return "2.28.9"

    def make_key(self) -> tuple[int, bytes]:
        return SUCCESS, bytes(range(KEY_BYTES))

    def begin(self, key: bytes, rank: int, size: int) -> tuple[int, int]:
        self.called.append("begin")
        return self.first, self.address

    def state(self, communicator: int) -> int:
        assert communicator == self.address
        return self.states.pop(0) if self.states else SUCCESS

    def broadcast(self, communicator: int, start: int, nbytes: int, stream: int) -> int:
        self.called.append(f"broadcast {nbytes}")
        return IN_PROGRESS

    def send(self, communicator: int, peer: int, start: int, nbytes: int, stream: int) -> int:
        self.called.append(f"send {nbytes} to {peer}")
        return self.sent

    def receive(self, communicator: int, peer: int, start: int, nbytes: int, stream: int) -> int:
        self.called.append(f"receive {nbytes} from {peer}")
        return SUCCESS

    def start_group(self) -> int:
        self.called.append("start group")
        return SUCCESS

    def end_group(self) -> int:
        self.called.append("end group")
        return IN_PROGRESS

    def abort(self, communicator: int) -> None:
        self.called.append(f"abort {communicator}")

    def words(self, code: int, communicator: int) -> str:
        return f"code {code} of {communicator}"


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """A torch with NCCL, and three devices; the first is the current one."""
    library = FakeLibrary()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "load", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUIDS[device.index]))
    for name in ALIKE:
        monkeypatch.delenv(name, raising=False)
    return library


def on(index: int, **changes: object) -> Endpoint:
    values: dict[str, object] = {"device": f"cuda:{UUIDS[index]}", "process": f"process {index}", **changes}
    return replace(local_endpoint("cpu"), **values)  # type: ignore[arg-type]


def reason(sender: Endpoint, *receivers: Endpoint, host: str = "127.0.0.1") -> str:
    return NcclTransport(host).refuse(Topology(sender=sender, receivers=receivers)) or "served"


def test_it_serves_devices_that_differ(devices: FakeLibrary) -> None:
    assert reason(on(0), on(1), on(2)) == "served"


def test_the_same_device_is_for_cuda_ipc(devices: FakeLibrary) -> None:
    assert "cuda_ipc is for processes that share one" in reason(on(0), on(1), on(0, process="another"))
    assert "2 workers are on cuda:bbbb" in reason(on(0), on(1), on(1, process="another"))


def test_host_memory_is_refused(devices: FakeLibrary) -> None:
    assert "this is not one" in reason(on(0), on(1, device="cpu"))
    assert "this is not one" in reason(on(0, device="cpu"), on(1))


def test_another_host_needs_an_address_that_it_reaches(devices: FakeLibrary) -> None:
    far = on(1, host="another")
    assert "CollectiveTransport('nccl', host=<address that it reaches>)" in reason(on(0), far)
    assert reason(on(0), far, host="10.0.0.9") == "served"


def test_without_nccl_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(on(0), on(1)) == "this build of torch has no nccl"

    def load() -> Library:
        raise UnsupportedError("libnccl.so.2 cannot be used in this process: not there")

    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "load", load)
    assert "libnccl.so.2 cannot be used" in reason(on(0), on(1))


def test_weights_in_host_memory_are_no_sender(devices: FakeLibrary) -> None:
    with pytest.raises(UnsupportedError, match="the trainer's weights are on cpu"):
        NcclTransport().sender(slot_bytes=64, num_slots=2, receivers=1, generation=1, device=CPU)


def test_a_library_that_is_not_there_is_unsupported() -> None:
    nccl_library.load.cache_clear()
    with pytest.raises(UnsupportedError, match=r"libnccl\.so\.2 cannot be used in this process"):
        nccl_library.load()


def test_variables_that_do_not_matter_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    assert fingerprint("2.28.9") == {"NCCL's version": "2.28.9", "NCCL_CUMEM_ENABLE": "0"}


def test_every_difference_is_named_with_both_values() -> None:
    here, there = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}, {"NCCL_ALGO": "Tree", "NCCL_BUFFSIZE": "1"}
    assert differences(here, there, "here", "at the sender") == [
        "NCCL_ALGO is 'Ring' here and 'Tree' at the sender",
        "NCCL_PROTO is 'LL' here and not set at the sender",
        "NCCL_BUFFSIZE is not set here and '1' at the sender",
    ]
    assert differences(here, dict(here), "here", "at the sender") == []


def test_a_receiver_compares_before_anything_is_made(devices: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = NcclBackend()
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    facts = backend.facts(torch.device("cuda", 1))
    assert facts == ("bbbb", "NCCL's version=2.28.9", "NCCL_CUMEM_ENABLE=0")
    backend.compare(facts)
    monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    with pytest.raises(ConfigError, match="NCCL_CUMEM_ENABLE is not set here and '0' at the sender"):
        backend.compare(facts)
    devices.version = lambda: "2.29.7"  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"NCCL's version is '2\.29\.7' here and '2\.28\.9' at the sender"):
        backend.compare(facts)


def test_communicators_that_must_block_are_refused(devices: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_COMM_BLOCKING", "1")
    with pytest.raises(ConfigError, match="leave it unset"):
        NcclBackend().facts(torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="leave it unset"):
        NcclBackend().compare(("bbbb",))


def test_the_sender_s_device_is_no_receiver_s(devices: FakeLibrary) -> None:
    backend = NcclBackend()
    with pytest.raises(ConfigError, match="NCCL takes every device once"):
        backend.compare(backend.facts(torch.device("cuda", 0)))


def seats(*ranks: int) -> Sequence[Seat]:
    """Of one group; what a board tells, all of them have."""
    boards: list[Board] = []

    def tell(key: str, value: bytes) -> None:
        for board in boards:
            board.put(key, value)

    boards.extend(Board(tell) for _ in ranks)
    return [
        Seat(rank=rank, size=2, here="127.0.0.1", timeout_s=5.0, board=board)
        for rank, board in zip(ranks, boards, strict=True)
    ]


def test_all_ranks_have_the_key_that_the_first_one_makes(devices: FakeLibrary) -> None:
    first, second = seats(0, 1)
    assert meet(first, lambda: None) == meet(second, lambda: None) == bytes(range(KEY_BYTES))


def test_a_key_that_is_none_is_refused(devices: FakeLibrary) -> None:
    first, second = seats(0, 1)
    first.board.post("key", b"short")
    with pytest.raises(ProtocolError, match="no key of NCCL's"):
        meet(second, lambda: None)


def test_a_key_that_cannot_be_made_is_an_error(devices: FakeLibrary) -> None:
    devices.make_key = lambda: (REMOTE_ERROR, b"")  # type: ignore[method-assign]
    [first] = seats(0)
    with pytest.raises(TransportError, match="no rank can be invited: code 6"):
        meet(first, lambda: None)


def communicator(library: FakeLibrary, check: Callable[[], None] = lambda: None) -> Communicator:
    return Communicator(library, bytes(KEY_BYTES), 0, 2, check)


def test_a_communicator_waits_for_what_goes_on_in_the_background() -> None:
    library = FakeLibrary(IN_PROGRESS, [IN_PROGRESS, IN_PROGRESS, SUCCESS, IN_PROGRESS, SUCCESS])
    made = communicator(library)
    assert len(library.states) == 2
    made.broadcast(0, 512, 0)
    assert not library.states
    made.look()
    made.abort()
    made.abort()
    assert library.called == ["begin", "broadcast 512", "abort 7"]


def test_an_exchange_is_one_group_which_ends_whatever_happens_in_it() -> None:
    library = FakeLibrary()
    made = communicator(library)
    library.called.clear()
    library.states = [IN_PROGRESS, SUCCESS]
    made.exchange([(1, 0, 8)], [(1, 64, 16), (2, 96, 4)], 0)
    expected = ["start group", "send 8 to 1", "receive 16 from 1", "receive 4 from 2", "end group"]
    assert library.called == expected
    assert not library.states
    library.sent = REMOTE_ERROR
    with pytest.raises(TransportError, match="NCCL: an exchange cannot begin: code 6 of 7"):
        made.exchange([(1, 0, 8)], [], 0)
    assert library.called[len(expected) :] == ["start group", "send 8 to 1", "end group"]

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    library.called.clear()
    library.send = interrupted  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        made.exchange([(1, 0, 8)], [], 0)
    assert library.called == ["start group", "end group"]


def test_a_wait_that_nobody_wants_ends_and_aborts() -> None:
    def check() -> None:
        raise SyncTimeout("nobody waits")

    library = FakeLibrary(IN_PROGRESS, [IN_PROGRESS] * 3)
    with pytest.raises(SyncTimeout):
        communicator(library, check)
    assert library.called == ["begin", "abort 7"]


def test_an_error_has_nccl_s_words() -> None:
    library = FakeLibrary(IN_PROGRESS, [REMOTE_ERROR])
    with pytest.raises(TransportError, match="NCCL: a communicator cannot be made: code 6 of 7"):
        communicator(library)
    assert library.called == ["begin", "abort 7"]
    library = FakeLibrary()
    made = communicator(library)
    library.states = [IN_PROGRESS]
    made.look()
    library.states = [REMOTE_ERROR]
    with pytest.raises(TransportError, match="NCCL: what was queued failed: code 6 of 7"):
        made.look()


def test_what_was_never_made_is_not_aborted() -> None:
    library = FakeLibrary(5, address=0)
    with pytest.raises(TransportError, match="code 5 of 0"):
        communicator(library)
    assert library.called == ["begin"]
