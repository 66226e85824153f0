"""An engine that is served at an address passes the engine kit through `wsync.RemoteEngine`."""

from collections.abc import Callable, Iterator

import pytest

import wsync
from tests.contract.test_engines import bench_of, llama
from tests.unit.test_control_messages import TOTAL_BYTES, Toy, counted, equal
from wsync.adapters.engines.hf import HFEngine
from wsync.testing.engine_conformance import ENGINE_CHECKS, EngineBench


@pytest.fixture(scope="module", params=["gloo", "shm"])
def remote(request: pytest.FixtureRequest) -> Iterator[EngineBench]:
    model = llama(0)
    with (
        wsync.serve(model) as served,
        wsync.RemoteEngine(served.address, secret=served.secret, timeout_s=30) as engine,
    ):
        yield bench_of(HFEngine(model), engine, request.param)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_a_served_engine(remote: EngineBench, check: Callable[[EngineBench], None]) -> None:
    check(remote)


def frames(count: int, transport: str) -> list[dict[str, int]]:
    """Frames over every link, both ways, of each of two syncs of a model with `count` tensors in ten buckets."""
    actor, model = Toy(count), Toy(count)
    config = wsync.SyncConfig(bucket_bytes=TOTAL_BYTES // 10, transport=transport, timeout_s=60.0)
    with (
        wsync.serve(HFEngine(model)) as served,
        wsync.RemoteEngine(served.address, secret=served.secret, timeout_s=30) as engine,
        wsync.connect(actor, engine, config=config) as session,
        pytest.MonkeyPatch.context() as patch,
        counted(patch) as tally,
    ):
        counts = []
        for _ in range(2):
            session.sync()
            counts.append(tally.take())
        assert equal(actor, model)
    return counts


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_as_many_messages_for_3000_tensors_as_for_30(transport: str) -> None:
    few, many = frames(30, transport), frames(3000, transport)
    assert few == many
    assert few[1]["frame ask"] == few[1]["frame ok"] < 12
