"""Where a quick look would be taken for a close one."""

from unittest.mock import patch

import pytest
import torch
from torch import nn

import wsync
from wsync.adapters.engines.hf import HFEngine
from wsync.adapters.engines.places import Places
from wsync.errors import EngineStateError, MismatchError, WsyncError

CONFIG = wsync.SyncConfig(timeout_s=10)


class Served(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))

    def generate(self, *args: object, **kwargs: object) -> None:
        raise AssertionError


@pytest.mark.parametrize("bucket", [1 << 20, 256])
def test_what_does_not_fit_any_more_is_refused_at_every_sync_before_a_byte_is_written(bucket: int) -> None:
    actor, served = Served(), Served()
    engine = HFEngine(served)
    with wsync.connect(actor, engine, config=wsync.SyncConfig(timeout_s=10, bucket_bytes=max(bucket, 4096))) as session:
        session.sync()
        session.sync()
        actor.a = nn.Linear(6, 3)  # another shape
        for _ in range(3):
            with pytest.raises(MismatchError):
                session.sync()
            assert engine.version() == 2


@pytest.mark.parametrize("what", ["is new", "is untied"])
def test_a_mismatch_that_is_seen_beside_the_copy_leaves_an_engine_that_refuses(what: str) -> None:
    """The old tensors were trusted and written by then: no version, and what a new session brings."""
    actor, served = Served(), Served()
    if what == "is untied":
        actor.b.weight, served.b.weight = actor.a.weight, served.a.weight
    engine = HFEngine(served)
    with wsync.connect(actor, engine, config=CONFIG) as session:
        session.sync()
        session.sync()
        if what == "is untied":
            actor.b.weight = nn.Parameter(actor.b.weight.detach().clone())
        else:
            actor.a.register_parameter("first", nn.Parameter(torch.zeros(3)))
        with pytest.raises(MismatchError, match="connect again"):
            session.sync()
        with pytest.raises(EngineStateError, match="no consistent version"):
            engine.version()
    if what == "is untied":
        actor.b.weight = actor.a.weight
    else:
        del actor.a.first
    assert wsync.sync(actor, served, config=CONFIG).version == 3
    assert all(torch.equal(a, s) for a, s in zip(actor.parameters(), served.parameters(), strict=True))


def test_a_sync_that_failed_on_what_was_trusted_is_not_repeated_for_ever() -> None:
    actor, served = Served(), Served()
    with wsync.connect(actor, HFEngine(served), config=CONFIG) as session:
        session.sync()
        session.sync()
        actor.a.weight.data = actor.a.weight.data.view(torch.complex64)  # where it lies
        with pytest.raises(WsyncError):
            session.sync()
        with pytest.raises(MismatchError):
            session.sync()


def test_a_tensor_whose_memory_shows_something_else_is_sent_once() -> None:
    actor, served = Served(), Served()
    actor.scale = torch.complex(torch.zeros(6), torch.ones(6)).conj().imag
    assert actor.scale.is_neg()
    engine = HFEngine(served)
    with wsync.connect(actor, engine, config=CONFIG) as session:
        for _ in range(3):
            with patch.object(engine, "abort", side_effect=AssertionError):
                session.sync()
            assert torch.equal(actor.get_buffer("scale"), served.get_buffer("scale"))


@pytest.mark.parametrize("what", ["buffer", "dtype", "strides"])
def test_what_an_engine_replaced_since_it_was_connected_is_not_published(what: str) -> None:
    """What was written is not what the model serves: it is said, and the next sync finds what is there now."""
    model = Served()
    places = Places("engine")
    places.settle(model)
    kept = model.scale
    if what == "buffer":
        model.scale = torch.zeros(6)
    elif what == "dtype":
        model.a.weight.data = model.a.weight.data.view(torch.complex64)
    else:
        model.a.weight.data = model.a.weight.data.t()
    written = places.recall()
    assert written is not None
    with pytest.raises(EngineStateError, match=r"replaced 1 tensor\(s\) since it was connected: (scale|a\.weight)"):
        places.confirm(model, written)
    assert places.recall() is None
    places.confirm(model, places.check(model, "since it was connected"))
    del kept
