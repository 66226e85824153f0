"""The transports that need a GPU pass the shipped conformance kit on one."""

from collections.abc import Callable

import pytest
import torch

from wsync.testing.bench import Bench
from wsync.testing.conformance import TRANSPORT_CHECKS
from wsync.transports.cuda_ipc import CudaIpcTransport

BENCH = Bench(make=CudaIpcTransport, processes=True, device=torch.device("cuda", 0), apart=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("check", TRANSPORT_CHECKS, ids=lambda check: check.__name__)
def test_conformance(check: Callable[[Bench], None]) -> None:
    check(BENCH)
