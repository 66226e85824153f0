"""Offload from a CUDA device: bits, pinned copies beside what the device does, and memory that really falls."""

import gc
from typing import Any

import pytest
import torch

from tests.unit.offload_models import copies, made, same, soon, step, tensors
from wsync.deadline import Deadline
from wsync.errors import SyncTimeout
from wsync.memory.host_copies import HostCopies
from wsync.memory.host_pool import HostPool, pinned_bytes
from wsync.memory.offload import Offload
from wsync.memory.residents import resident_for_model, resident_for_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20


def test_twenty_cycles_are_flat_and_training_does_not_notice() -> None:
    step(*made("large", "cuda"), 0)  # what libraries keep for good
    pool, pinned = HostPool(), pinned_bytes()
    before = torch.cuda.memory_allocated()
    model, optimizer = made("large", "cuda")
    step(model, optimizer, 0)
    alone, its_optimizer = made("large", "cuda")
    step(alone, its_optimizer, 0)
    of_model = resident_for_model("actor", model, pool)
    of_optimizer = resident_for_optimizer("adamw", optimizer, pool)
    full = torch.cuda.memory_allocated()
    seen, reserved = set(), []
    for cycle in range(20):
        of_model.release(soon())
        of_optimizer.release(soon())
        away = torch.cuda.memory_allocated()
        assert full - away >= (of_model.nbytes or 0) + (of_optimizer.nbytes or 0)
        of_optimizer.restore(soon())
        of_model.restore(soon())
        assert torch.cuda.memory_allocated() == full
        seen.add((away, pool.nbytes, pinned_bytes()))
        reserved.append(torch.cuda.memory_reserved())
        if cycle % 5 == 0:
            assert same(tensors(model), tensors(alone))
    assert len(seen) == 1, seen
    assert len(set(reserved[5:])) == 1, reserved
    assert pool.pinned_nbytes == pool.nbytes > 8 * MIB
    for one, its in ((model, optimizer), (alone, its_optimizer)):
        step(one, its, 1)
    assert same(tensors(model), tensors(alone))
    del model, optimizer, alone, its_optimizer, of_model, of_optimizer, one, its
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    pool.close()
    assert pinned_bytes() == pinned


@pytest.mark.parametrize("name", ["plain", "tied", "flat"])
def test_bits_of_tensors_that_share_memory(name: str) -> None:
    model, _ = made(name, "cuda")
    before, objects = copies(model), list(model.parameters())
    resident = resident_for_model("actor", model, HostPool())
    for _ in range(3):
        resident.release(soon())
        assert {tensor.untyped_storage().nbytes() for tensor in tensors(model)} == {0}
        resident.restore(soon())
        assert same(tensors(model), before)
    assert all(one is other for one, other in zip(objects, model.parameters(), strict=True))


def test_copies_come_after_what_is_queued_and_before_what_follows() -> None:
    """Memory that was just freed is filled with other bytes by work that still runs when it is handed out again."""
    pool = HostPool()
    big = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    resident = Offload("big", lambda: [big], pool)
    for value in range(1, 5):
        busy = torch.randn(4096, 4096, device="cuda")
        for _ in range(10):
            busy = busy @ busy / 64
        big.fill_(value)
        resident.release(soon())
        other = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        for _ in range(10):
            busy = busy @ busy / 64
        other.fill_(200)
        del other
        resident.restore(soon())
        assert bool((big == value).all())


def test_the_side_stream_is_kept() -> None:
    made_streams = HostCopies()
    source = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    pool = HostPool()
    [host] = pool.take("test", [MIB], pinned=True)
    assert host.is_pinned()
    streams = set()
    for _ in range(3):
        made_streams.run([(host, source)], soon(), "a copy")
        streams |= {stream.cuda_stream for stream in made_streams._streams.values()}
    assert len(streams) == 1
    assert streams != {torch.cuda.current_stream().cuda_stream}
    assert bool((host == 1).all())


def test_host_tensors_beside_a_device_stay() -> None:
    on_host, on_device = torch.ones(1000), torch.ones(1000, device="cuda")
    resident = Offload("both", lambda: [on_host, on_device], HostPool())
    assert resident.nbytes == 4000
    resident.release(soon())
    assert on_host.sum().item() == 1000
    assert on_device.untyped_storage().nbytes() == 0
    resident.restore(soon())
    assert on_device.sum().item() == 1000


def test_a_deadline_that_passes_while_the_device_is_busy() -> None:
    occupy: Any = torch.cuda._sleep
    tensor = torch.full((MIB,), 5, dtype=torch.uint8, device="cuda")
    resident = Offload("tensor", lambda: [tensor], HostPool())
    resident.release(soon())
    resident.restore(soon())
    for present in (True, False):
        occupy(2_000_000_000)  # about a second
        with pytest.raises(SyncTimeout, match="still waiting for tensor to be copied"):
            (resident.release if present else resident.restore)(Deadline.after(0.02))
        assert resident.present == present
        torch.cuda.synchronize()
        if present:
            assert bool((tensor == 5).all())
            resident.release(soon())
    resident.restore(soon())
    assert bool((tensor == 5).all())
