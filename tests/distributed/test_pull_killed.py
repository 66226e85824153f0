"""A trainer rank that is killed while the worker of another rank has its memory mapped; on a GPU, too."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wsync
from tests.distributed.test_sync_ranks import llama
from wsync.testing.ranks import Rank, run_ranks

PULL = wsync.SyncConfig(path="pull", timeout_s=30.0)
AT_ONCE_S = 20.0
"""A reader may wait for its device for 10 s; the deadline is 30 s."""


def a_rank_is_killed(me: Rank, kind: str) -> tuple[str, float]:
    """SIGKILL of rank 1 between two syncs. What rank 0 hears, whose worker reads both, and after how long."""
    if kind == "cuda":
        torch.cuda.set_device(me.rank % torch.cuda.device_count())
    actor = llama(1).to(kind)
    fully_shard(actor, mesh=init_device_mesh(kind, (me.world_size,)))
    engine = llama(100).to(kind) if me.rank == 0 else None
    with wsync.connect(actor, engine, config=PULL) as session:
        session.sync()
        dist.barrier()
        if engine is None:
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("this rank is dead")
        wanted = dict(llama(1).named_parameters())
        assert all(torch.equal(parameter.cpu(), wanted[name]) for name, parameter in engine.named_parameters())
        began = time.monotonic()
        with pytest.raises(wsync.RankError) as caught:
            session.sync()
        seconds = time.monotonic() - began
    values = torch.randn(1 << 20)
    assert torch.equal(values.to(kind).clone().cpu(), values)
    return str(caught.value), seconds


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_a_rank_that_is_killed_is_heard_and_the_reader_s_device_works(kind: str) -> None:
    (words, seconds), _ = run_ranks(a_rank_is_killed, 2, kind, timeout_s=120, expected_dead=[1])
    assert "trainer rank(s) [1]" in words
    assert seconds < AT_ONCE_S
