"""The control channel of a served engine: who is let in, what is refused, and what is left when a trainer goes."""

import itertools
import os
import resource
import signal
import socket
import struct
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wsync
from tests.unit.fake_engine import ERROR, FakeEngine, soon
from wsync import wire
from wsync.calls import Calls, deadline_args
from wsync.deadline import Deadline
from wsync.errors import ConfigError, EngineStateError, PeerError, SyncTimeout, TransportError
from wsync.served import Served, ticket_for
from wsync.topology import local_endpoint
from wsync.transports.dial import address_parts, dial
from wsync.transports.link import Link, ready
from wsync.transports.listener import Listener, Welcome, connect

SECRET = "a secret that both worlds know"


def fake() -> FakeEngine:
    engine = FakeEngine()
    here = local_endpoint("cpu")
    engine.answers["hello"] = [{"version": 0, "state": "serving", "endpoint": here}] * 2
    return engine


@pytest.fixture
def engine() -> FakeEngine:
    return fake()


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[Served]:
    with wsync.serve(engine, secret=SECRET) as served:
        yield served


def reach(*served: Served) -> wsync.RemoteEngine:
    return wsync.RemoteEngine(*(one.address for one in served), secret=SECRET, timeout_s=20)


def raw(served: Served) -> socket.socket:
    sock = dial(served.address, "the engine", soon())
    sock.settimeout(20)
    return sock


def test_calls_and_answers_go_through(engine: FakeEngine, served: Served) -> None:
    with reach(served) as remote:
        assert remote.name == f"fake at {served.address}"
        assert remote.replica == engine.replica
        assert list(remote.endpoints()) == [local_endpoint("cpu")] * 2
        assert (remote.version(), remote.last_version(), remote.attachment) == (0, 0, None)
        remote.pause("wait", soon())
        remote.begin(1, "a", soon(), digest=True)
        assert [loaded.digests for loaded in remote.join(soon())] == [{"a": 1}, {"a": 2}]
        remote.finish(1, "a", soon())
        remote.resume()
        assert remote.version() == engine.version() == 1
        assert engine.reason is None


def test_errors_keep_their_type_and_bring_the_traceback(engine: FakeEngine, served: Served) -> None:
    engine.answers["update"] = [{"error": ERROR}, {"error": ERROR}]
    with reach(served) as remote:
        with pytest.raises(wsync.UnsupportedError, match="fake cannot freeze") as caught:
            remote.pause("keep", soon())
        assert "fake_engine.py" in str(caught.value.__cause__)
        assert engine.reason is None
        remote.pause("wait", soon())
        remote.begin(1, "a", soon(), digest=False)
        with pytest.raises(PeerError, match="worker 0 of fake failed in 'update': ValueError: no room") as worker:
            remote.join(soon())
        assert "line 7" in worker.value.remote_traceback
        remote.abort("a", "a worker failed", soon())
        remote.resume()
        assert remote.version() == 0


def test_a_trainer_that_goes_ends_its_attempt(engine: FakeEngine, served: Served) -> None:
    engine.hold.clear()
    remote = reach(served)
    remote.pause("wait", soon())
    remote.begin(1, "a", soon(), digest=False)
    remote.disconnect()
    with pytest.raises(PeerError, match="was lost"):
        remote.join(soon())
    engine.hold.set()
    with reach(served) as other:
        other.pause("wait", soon())
        other.begin(2, "b", soon(), digest=False)
        other.join(soon())
        other.finish(2, "b", soon())
        other.resume()
        assert engine.version() == 2
    assert "abort" in engine.calls


def test_a_second_trainer_is_refused_while_the_first_one_syncs(engine: FakeEngine, served: Served) -> None:
    with reach(served) as first, reach(served) as second:
        first.pause("wait", soon())
        with pytest.raises(EngineStateError, match="another trainer is syncing"):
            second.pause("wait", soon())
        second.resume()
        assert engine.reason is not None, "the second one resumed what the first one had paused"
        first.resume()
        second.pause("wait", soon())
        second.resume()


def test_parts_end_in_the_same_state(engine: FakeEngine, served: Served) -> None:
    other = fake()
    with wsync.serve(other, secret=SECRET) as served_too, reach(served, served_too) as remote:
        assert len(remote.endpoints()) == 4
        remote.pause("wait", soon())
        remote.begin(1, "a", soon(), digest=True)
        remote.join(soon())
        published, guard = threading.Event(), engine.guard

        def tell(reason: str | None) -> None:
            guard(reason)
            published.set()

        def fail_later() -> PeerError:
            assert published.wait(20)
            return PeerError("gone")

        engine.guard = tell  # type: ignore[method-assign]
        other.answers["publish"] = fail_later
        with pytest.raises(PeerError, match="gone"):
            remote.finish(1, "a", soon())
        assert engine.version() == 1
        remote.abort("a", "one part failed", soon())
        for part in (engine, other):
            with pytest.raises(EngineStateError, match="refuses to serve"):
                part.version()


def test_parts_are_called_at_the_same_time(engine: FakeEngine, served: Served) -> None:
    other, both = fake(), threading.Barrier(2)
    with wsync.serve(other, secret=SECRET) as served_too, reach(served, served_too) as remote:
        for part in (engine, other):
            part.on_resume = lambda deadline: both.wait(20) and None  # type: ignore[assignment,method-assign]
        remote.pause("wait", soon())
        remote.resume()


def test_an_engine_that_ends_is_heard_at_once_and_its_successor_is_found(engine: FakeEngine) -> None:
    served = wsync.serve(engine, secret=SECRET)
    remote = reach(served)
    engine.sync(3)
    assert remote.last_version() == 3
    remote.pause("wait", soon())
    name = f"wsync the engine at {served.address}"
    [listening] = [thread for thread in threading.enumerate() if thread.name == name]
    served.close()
    listening.join(20)  # until it has heard of the end
    with pytest.raises(PeerError, match="was lost"):
        remote.finish(4, "a", soon())
    with pytest.raises(PeerError, match="does not listen"):
        remote.version()
    with wsync.serve(fake(), served.address, secret=SECRET):
        assert remote.version() == 0
        assert remote.last_version() == 4, "versions that were promised before are not given again"
    remote.disconnect()


def test_what_cannot_be_reached_is_refused(served: Served) -> None:
    with pytest.raises(PeerError, match="does not know the secret"):
        wsync.RemoteEngine(served.address, secret="x" * 32, timeout_s=20)
    with pytest.raises(ConfigError, match="at least 16"):
        wsync.RemoteEngine(served.address, secret="short", timeout_s=20)
    with pytest.raises(ConfigError, match="host:port"):
        wsync.RemoteEngine("nowhere", secret=SECRET, timeout_s=20)
    with pytest.raises(ConfigError):
        wsync.RemoteEngine(secret=SECRET)
    with pytest.raises(TransportError, match="cannot listen"):
        wsync.serve(fake(), served.address, secret=SECRET)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(SyncTimeout):
        wsync.RemoteEngine(f"127.0.0.1:{silent.getsockname()[1]}", secret=SECRET, timeout_s=0.3)


def test_it_listens_where_it_was_told_and_nowhere_else(served: Served) -> None:
    host, port = address_parts(served.address)
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


def authenticated(served: Served) -> Calls:
    link, _ = connect(ticket_for(SECRET), 0, soon(), at=served.address, peer="the engine")
    return Calls(link)


def test_an_oversized_frame_ends_the_connection_and_nothing_else(served: Served) -> None:
    with raw(served) as sock:
        wire.recv_frame(sock, soon())
        sock.sendall(struct.pack("!I", 4097))
        assert "bound is 4096" in str(wire.recv_frame(sock, soon())[0])
    link, _ = connect(ticket_for(SECRET), 0, soon(), at=served.address, peer="the engine")
    link._sock.sendall(struct.pack("!I", wire.MAX_FRAME_BYTES + 1))
    calls = Calls(link)
    with pytest.raises(PeerError):
        calls.ask("hello", {}, soon()).result(20)
    with reach(served) as remote:
        assert remote.version() == 0


def test_closing_while_the_door_is_being_opened(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` may come between the wait and the accept: no thread may end with an error."""
    admit, opening, closed = Listener.admit, threading.Event(), threading.Event()

    def late(self: Listener, welcome: Welcome) -> Iterator[tuple[int, Link]]:
        opening.set()
        assert closed.wait(20)
        return admit(self, welcome)

    monkeypatch.setattr(Listener, "admit", late)
    shutdown = Listener.shutdown

    def early(self: Listener) -> None:
        shutdown(self)
        closed.set()

    monkeypatch.setattr(Listener, "shutdown", early)
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    with wsync.serve(engine, secret=SECRET) as served, raw(served):
        assert opening.wait(20)
    assert not died


def test_no_descriptor_left_for_a_new_trainer(
    engine: FakeEngine, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Those who are in go on; new ones come in when there is room again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with reach(served) as remote, socket.socket() as late:
        late.settimeout(20)
        host, port = address_parts(served.address)
        with open(os.devnull) as lowest:
            full = lowest.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (full, hard))
        try:
            late.connect((host, port))
            for number in itertools.count(1):
                assert remote.version() == 0
                if "Too many open files" in caplog.text:
                    break
                assert number < 10_000, "nobody said why the trainer must wait"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "challenge" in str(wire.recv_frame(late, soon())[0])


@pytest.mark.parametrize("message", [("ask",), ("ask", "one", 2, 3), ("tell", 1), ("ask", 1, "hello", ())])
def test_nonsense_from_a_trainer_ends_its_connection(served: Served, message: Sequence[object]) -> None:
    link, _ = connect(ticket_for(SECRET), 0, soon(), at=served.address, peer="the engine")
    link.send(tuple(message), soon())
    assert ready(link.filenos(), 20)
    with pytest.raises(PeerError, match="closed the connection"):
        link.receive()
    link.close()
    with reach(served) as remote:
        assert remote.version() == 0


@pytest.mark.parametrize(
    ("op", "args"), [("eval", {}), ("begin", {}), ("pause", {"uses": 0, "mode": "wait"}), ("attach", {})]
)
def test_calls_that_do_not_exist_or_lack_arguments_are_errors(served: Served, op: str, args: dict[str, object]) -> None:
    calls = authenticated(served)
    for more in ({}, deadline_args(soon(), "the test")):
        with pytest.raises(wsync.WsyncError):
            calls.ask(op, {**args, **more}, soon()).result(20)
    calls.close()


FRAMES = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(lambda body: struct.pack("!I", len(body)) + body),
    st.lists(st.one_of(st.just("hello"), st.integers(0, 9), st.binary(max_size=40)), max_size=6)
    .map(lambda items: wire.pack(tuple(items)))
    .map(lambda body: struct.pack("!I", len(body)) + body),
)


@pytest.fixture(scope="module")
def garbage_eater() -> Iterator[Served]:
    with wsync.serve(fake(), secret=SECRET) as served:
        yield served


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=FRAMES)
def test_garbage_on_the_port_hurts_nobody(garbage_eater: Served, garbage: bytes) -> None:
    with raw(garbage_eater) as sock, suppress(OSError):  # it may hang up on us in the middle
        sock.sendall(garbage)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    with reach(garbage_eater) as remote:
        assert remote.version() == 0


def test_a_crowd_of_silent_visitors_keeps_nobody_out(served: Served) -> None:
    crowd = [raw(served) for _ in range(80)]
    with reach(served) as remote:
        assert remote.version() == 0
    gone = 0
    for sock in itertools.islice(crowd, 10):
        while data := sock.recv(4096):
            assert data
        gone += 1
    assert gone == 10, "those that were silent longest are sent away"
    for sock in crowd:
        sock.close()


def test_a_deadline_on_this_side_is_kept(engine: FakeEngine, served: Served) -> None:
    engine.hold.clear()
    with reach(served) as remote:
        remote.pause("wait", soon())
        remote.begin(1, "a", soon(), digest=False)
        with pytest.raises(SyncTimeout):
            remote.join(Deadline.after(0.2))
        engine.hold.set()
        remote.abort("a", "too slow", soon())
        remote.resume()


def test_a_child_that_was_forked_does_not_keep_the_connection(engine: FakeEngine, served: Served) -> None:
    """A trainer's data loader may outlive it: the engine must hear of the death all the same."""
    engine.hold.clear()
    ours, theirs = socket.socketpair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what trainers do
        trainer = os.fork()
    if not trainer:
        remote = reach(served)
        remote.pause("wait", soon())
        remote.begin(1, "a", soon(), digest=False)
        if not os.fork():
            theirs.sendall(struct.pack("!I", os.getpid()))  # only now is the fork over on this side, too
            theirs.recv(1)
            os._exit(0)
        signal.pause()
    (loader,) = struct.unpack("!I", ours.recv(4))
    try:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        engine.hold.set()
        with reach(served) as other:
            other.pause("wait", soon())
            other.resume()
    finally:
        os.kill(loader, signal.SIGKILL)
        ours.close()
        theirs.close()
