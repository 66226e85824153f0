"""A worker behind real transports: what it answers, what it holds after each failure, and that it can go on."""

import threading
from contextlib import suppress

import pytest
import torch

from tests.unit.toy_loader import Place, ToyLoader, checkpoint
from tests.unit.worker_rig import TIMEOUT_S, Failed, assert_holds, rig
from wsync import wire
from wsync.digest import digest
from wsync.errors import PeerError
from wsync.state import State
from wsync.worker import Worker


@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_three_syncs_in_a_row(transport: str) -> None:
    with rig(ToyLoader(1, 2), transport) as r:
        r.attach(checkpoint(0))
        pointers = [tensor.data_ptr() for tensor in r.loader.targets().values()]
        for version in (1, 2, 5):
            answer = r.sync(checkpoint(version), version, f"attempt {version}")
            assert_holds(r.loader, checkpoint(version))
            assert answer["digests"] == {}
            assert answer["seconds"].keys() == {"wait", "load", "finish"}
            assert r.worker.state == State(version=version)
        assert r.loader.calls == ["begin", "finish"] * 3
        assert [tensor.data_ptr() for tensor in r.loader.targets().values()] == pointers
        assert [state.kind for state in r.states] == ["updating", "loaded", "serving"] * 3


def test_digests_are_those_of_the_bytes_sent() -> None:
    weights = checkpoint(3)
    with rig() as r:
        r.attach(weights, bucket_bytes=256)
        updating = r.update(1, "a", digest=True)
        r.send(weights)
        digests = updating.result(TIMEOUT_S)["digests"]
        expected = {s.name: digest(weights[s.name], word_bytes=s.word_bytes) for s in r.plan.specs}
        assert digests == expected


def test_a_sender_that_closes_before_the_first_bucket_leaves_the_old_version() -> None:
    with rig() as r:
        r.attach(checkpoint(0))
        r.sync(checkpoint(1), 1, "a")
        updating = r.update(2, "b")
        r.close_sender()
        with pytest.raises(Failed, match="PeerError"):
            updating.result(TIMEOUT_S)
        assert r.ask("abort", attempt="b") == {"state": "serving"}
        assert r.worker.state == State(version=1)
        assert_holds(r.loader, checkpoint(1))
        r.attach(checkpoint(0))
        r.sync(checkpoint(2), 2, "c")
        assert_holds(r.loader, checkpoint(2))


@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_a_sender_that_closes_in_the_middle_leaves_the_worker_torn_until_a_full_sync(transport: str) -> None:
    with rig(transport=transport) as r:
        r.attach(checkpoint(0))
        updating = r.update(1, "a")
        r.send(checkpoint(1), count=2)
        r.close_sender()
        with pytest.raises(Failed, match="PeerError"):
            updating.result(TIMEOUT_S)
        assert r.loader.calls == ["begin", "rollback"]
        hello = r.ask("hello")
        assert (hello["state"], hello["version"]) == ("torn", 0)
        assert "PeerError" in hello["reason"]
        with pytest.raises(Failed, match="attach before version 2"):
            r.update(2, "b").result(TIMEOUT_S)
        r.attach(checkpoint(0))
        r.sync(checkpoint(2), 2, "c")
        assert r.worker.state == State(version=2)
        assert_holds(r.loader, checkpoint(2))


class Breaking(ToyLoader):
    """Sends one tensor through its loader, which may raise; `finish` and `rollback` may raise too."""

    broken = ""

    def places(self) -> dict[str, Place]:
        def norm(weight: torch.Tensor) -> None:
            if self.broken == "load" and weight.device.type != "meta":
                raise ValueError("no room for the norm")
            self.direct(self.model.norm, weight * 2)

        return {**super().places(), "norm.weight": norm}

    def begin(self) -> None:
        super().begin()
        if self.broken == "begin":
            raise ValueError("not now")

    def finish(self) -> None:
        super().finish()
        if self.broken == "finish":
            raise ValueError("a layer is incomplete")

    def rollback(self) -> None:
        super().rollback()
        if self.broken == "rollback":
            raise ValueError("cannot roll back")


def test_a_loader_of_a_part_does_not_make_the_rest_whole() -> None:
    """Weights that broke off stay broken until all of them come, however the next loader calls itself."""
    loader = ToyLoader()
    with rig(loader) as r:
        loader.whole = False
        r.attach(checkpoint(0))
        with pytest.raises(Failed, match="a sleep of level 2 dropped them"):
            r.ask("update", version=1, attempt="a", timeout_s=TIMEOUT_S, digest=False, void=True)
        loader.whole = True
        for version, whole in enumerate((True, False, True, False), start=1):
            r.attach(checkpoint(0))
            loader.whole = whole
            updating = r.update(version, str(version))
            if version == 1:  # breaks off
                r.send(checkpoint(1), count=1)
                r.close_sender()
            if version < 3:
                words = {1: "closed", 2: "no whole base weights, as a sync of them failed"}[version]
                with pytest.raises(Failed, match=words):
                    updating.result(TIMEOUT_S)
                assert r.worker.state.kind == "torn"
            else:
                r.send(checkpoint(version))
                updating.result(TIMEOUT_S)
                r.ask("publish", version=version, attempt=str(version))
                assert_holds(loader, checkpoint(version))


def test_a_loader_that_fails_tells_the_sender_with_its_traceback() -> None:
    loader = Breaking()
    with rig(loader) as r:
        r.attach(checkpoint(0))
        loader.broken = "load"
        updating = r.update(1, "a")
        with pytest.raises(PeerError, match="no room for the norm") as caught:
            r.send(checkpoint(1))
        assert "in norm" in caught.value.remote_traceback
        with pytest.raises(Failed, match="ValueError: no room for the norm"):
            updating.result(TIMEOUT_S)
        assert r.worker.state.kind == "torn"
        loader.broken = ""
        r.attach(checkpoint(0))
        r.sync(checkpoint(2), 2, "b")
        assert_holds(loader, checkpoint(2))


@pytest.mark.parametrize(("broken", "state"), [("begin", "serving"), ("finish", "torn")])
def test_failures_of_begin_and_finish(broken: str, state: str) -> None:
    loader = Breaking()
    with rig(loader) as r:
        r.attach(checkpoint(0))
        loader.broken = broken
        updating = r.update(1, "a")
        if broken == "finish":
            with suppress(PeerError):  # the sender hears of it too, if it still waits
                r.send(checkpoint(1))
        with pytest.raises(Failed, match="ValueError"):
            updating.result(TIMEOUT_S)
        assert r.worker.state.kind == state
        assert r.loader.calls[-1] == "rollback"


def test_a_failed_rollback_leaves_the_worker_torn_though_nothing_was_written() -> None:
    loader = Breaking()
    with rig(loader) as r:
        r.attach(checkpoint(0))
        loader.broken = "rollback"
        updating = r.update(1, "a")
        r.close_sender()
        with pytest.raises(Failed, match="cannot roll back"):
            updating.result(TIMEOUT_S)
        assert r.worker.state.kind == "torn"
        assert "its rollback failed" in r.worker.state.reason


def test_an_interrupt_is_not_swallowed_and_leaves_the_worker_torn() -> None:
    class Interrupted(ToyLoader):
        def finish(self) -> None:
            raise KeyboardInterrupt

    with rig(Interrupted()) as r:
        r.attach(checkpoint(0))
        updating = r.update(1, "a")
        with suppress(PeerError):
            r.send(checkpoint(1))
        with pytest.raises(KeyboardInterrupt):
            updating.result(TIMEOUT_S)
        assert r.worker.state.kind == "torn"
        assert r.ask("abort", attempt="a") == {"state": "torn"}


def test_versions_only_grow_and_attempts_are_fenced() -> None:
    with rig() as r:
        r.attach(checkpoint(0))
        r.sync(checkpoint(1), 3, "a")
        with pytest.raises(Failed, match="version 3 is not newer than version 3"):
            r.update(3, "b").result(TIMEOUT_S)
        r.attach(checkpoint(0))
        r.ask("abort", attempt="c")
        with pytest.raises(Failed, match="attempt c at version 4 was ended before it began"):
            r.update(4, "c").result(TIMEOUT_S)
        r.attach(checkpoint(0))
        with pytest.raises(Failed, match="attempt a is over"):
            r.ask("publish", version=3, attempt="a")
        updating = r.update(4, "d")
        r.send(checkpoint(2))
        updating.result(TIMEOUT_S)
        with pytest.raises(Failed, match="attempt d cannot publish version 5"):
            r.ask("publish", version=5, attempt="d")
        with pytest.raises(Failed, match="cannot describe its parameters until that attempt is over"):
            r.ask("describe", specs=[])
        assert r.ask("abort", attempt="d") == {"state": "torn"}, "loaded, and not to be published"
        with pytest.raises(Failed, match="attempt d is over"):
            r.ask("publish", version=4, attempt="d")


def test_a_worker_that_refuses_an_update_tells_the_sender() -> None:
    with rig() as r:
        r.attach(checkpoint(0))
        r.sync(checkpoint(1), 1, "a")
        with pytest.raises(Failed, match="version 1 is not newer"):
            r.update(1, "b").result(TIMEOUT_S)
        with pytest.raises(PeerError, match="version 1 is not newer"):
            r.send(checkpoint(2))
        with pytest.raises(Failed, match="attach before version 2"):
            r.update(2, "c").result(TIMEOUT_S)
        r.attach(checkpoint(0))
        r.sync(checkpoint(2), 2, "d")
        assert_holds(r.loader, checkpoint(2))


def test_an_abort_while_the_update_runs_ends_it_at_its_next_bucket() -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Slow(ToyLoader):
        def places(self) -> dict[str, Place]:
            def norm(weight: torch.Tensor) -> None:
                if weight.device.type != "meta":
                    entered.set()
                    assert go_on.wait(TIMEOUT_S)
                self.direct(self.model.norm, weight * 1)

            return {**super().places(), "norm.weight": norm}

    weights = {"norm.weight": checkpoint(1)["norm.weight"], **checkpoint(1)}
    with rig(Slow()) as r:
        r.attach(weights, bucket_bytes=256)
        updating = r.update(1, "a")
        sending = r.pool.submit(r.send, weights)
        assert entered.wait(TIMEOUT_S)
        assert r.ask("abort", attempt="a") == {"state": "updating"}
        with pytest.raises(Failed, match="is loading version 1 and cannot begin version 2"):
            r.ask("update", version=2, attempt="b", timeout_s=1.0, digest=False)
        go_on.set()
        with pytest.raises(Failed, match="attempt a is over"):
            updating.result(TIMEOUT_S)
        with pytest.raises(PeerError, match="attempt a is over"):
            sending.result(TIMEOUT_S)
        assert r.worker.state.kind == "torn"


@pytest.mark.parametrize("payload", [b"", b"\xc1", wire.pack([1, 2]), wire.pack({})])
@pytest.mark.parametrize("method", ["update", "attach", "describe", "publish", "abort", "no such method"])
def test_a_bad_frame_is_an_error_reply(method: str, payload: bytes) -> None:
    worker = Worker(ToyLoader())
    reply = wire.unpack(worker.handle(method, payload))
    assert isinstance(reply, dict)
    assert set(reply) == {"error"}
    assert worker.state == State()


def test_an_engine_that_fails_as_it_hears_of_an_update_stays_as_it_was() -> None:
    with rig() as r:
        heard: list[str] = []

        def broken(state: State) -> None:
            heard.append(state.kind)
            if heard == ["updating"]:
                raise ValueError("the gate is stuck")

        r.worker = Worker(r.loader, on_state=broken)
        r.attach(checkpoint(0))
        updating = r.update(1, "a")
        with pytest.raises(PeerError, match="ValueError: the gate is stuck"):
            r.send(checkpoint(1))
        with pytest.raises(Failed, match="ValueError: the gate is stuck"):
            updating.result(TIMEOUT_S)
        assert r.worker.state == State()
        r.attach(checkpoint(0))
        r.sync(checkpoint(2), 2, "b")
        assert_holds(r.loader, checkpoint(2))
