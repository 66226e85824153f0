"""Every built-in transport passes the shipped conformance kit."""

from collections.abc import Callable

import pytest

from wsync.testing.bench import Bench
from wsync.testing.conformance import TRANSPORT_CHECKS
from wsync.transports.inproc import InprocTransport
from wsync.transports.shm import ShmTransport

BENCHES = {
    "inproc": Bench(make=InprocTransport, processes=False),
    "shm": Bench(make=ShmTransport, processes=True),
    "shm-threads": Bench(make=ShmTransport, processes=False),
}


@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("bench", BENCHES.values(), ids=BENCHES.keys())
def test_conformance(bench: Bench, check: Callable[[Bench], None]) -> None:
    check(bench)
