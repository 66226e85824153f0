"""An engine that is served at an address passes the engine kit through `wsync.RemoteEngine`."""

from collections.abc import Callable, Iterator

import pytest

import wsync
from tests.contract.test_engines import bench_of, llama
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
