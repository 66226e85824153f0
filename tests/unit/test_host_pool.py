"""Host memory for what is away: used again, bounded, and given back."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from wsync.errors import AdmissionError, ClosedError, ConfigError
from wsync.memory import host_pool
from wsync.memory.host import available_bytes
from wsync.memory.host_pool import HostPool, pinned_bytes

MIB = 1 << 20


def addresses(blocks: list[torch.Tensor]) -> list[int]:
    return [block.data_ptr() for block in blocks]


def test_a_block_of_the_same_size_is_the_same_memory_again() -> None:
    pool = HostPool()
    first = pool.take("actor", [100, 4096, 100], pinned=False)
    assert [block.shape for block in first] == [(100,), (4096,), (100,)]
    assert {block.dtype for block in first} == {torch.uint8}
    first[1].fill_(7)
    pool.put_back("actor")
    assert addresses(pool.take("actor", [100, 4096, 100], pinned=False)) == addresses(first)
    pool.put_back("actor")
    assert pool.nbytes == 4296
    turned = pool.take("actor", [4096, 50, 100], pinned=False)
    assert addresses(turned)[0] == addresses(first)[1]
    assert addresses(turned)[2] == addresses(first)[0]
    assert pool.nbytes == 4246, "the block that fits nothing any more is gone"
    assert pool.holders == {"actor": 4246}


def test_owners_share_nothing() -> None:
    pool = HostPool()
    one, other = pool.take("one", [100], pinned=False), pool.take("other", [100], pinned=False)
    assert addresses(one) != addresses(other)
    with pytest.raises(ConfigError, match="two things named 'one' use the same host memory"):
        pool.take("one", [100], pinned=False)


def test_a_refusal_says_what_is_needed_and_who_holds_what() -> None:
    pool = HostPool(3 * MIB)
    pool.take("reference", [2 * MIB], pinned=False)
    words = (
        r"actor needs 2097152 more bytes \(2.0 MiB\) of host memory; the budget is 3.0 MiB and the pool holds 2.0 MiB: "
        r"reference 2.0 MiB. Raise the budget"
    )
    for call in (pool.check, pool.take):
        with pytest.raises(AdmissionError, match=words):
            call("actor", [2 * MIB], pinned=False)
    assert pool.nbytes == 2 * MIB
    pool.take("actor", [MIB], pinned=False)


def test_blocks_that_are_to_be_freed_count_as_room() -> None:
    pool = HostPool(3 * MIB)
    pool.take("actor", [2 * MIB], pinned=False)
    pool.put_back("actor")
    pool.take("actor", [3 * MIB], pinned=False)
    assert pool.nbytes == 3 * MIB


def test_what_the_machine_has_is_a_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    available = available_bytes()
    assert available is not None
    assert available > 0
    monkeypatch.setattr(host_pool, "available_bytes", lambda: 5 * MIB)
    pool = HostPool()
    with pytest.raises(
        AdmissionError, match=r"actor needs 6291456 .* this machine has 5.0 MiB left and the pool holds"
    ):
        pool.take("actor", [6 * MIB], pinned=False)
    monkeypatch.setattr(host_pool, "available_bytes", lambda: None)
    pool.take("actor", [6 * MIB], pinned=False)


def test_without_an_accelerator_nothing_is_pinned() -> None:
    pool = HostPool()
    before = pinned_bytes()
    pool.take("actor", [MIB], pinned=False)
    assert pool.pinned_nbytes == 0
    assert pinned_bytes() == before


def test_a_closed_pool() -> None:
    pool = HostPool()
    [block] = pool.take("actor", [100], pinned=False)
    block.fill_(3)
    pool.close()
    pool.close()
    assert pool.nbytes == 0
    assert set(block.tolist()) == {3}, "who still has a block keeps its bytes"
    with pytest.raises(ClosedError, match="the host memory for actor is closed"):
        pool.take("actor", [100], pinned=False)


def test_a_budget_below_zero() -> None:
    with pytest.raises(ConfigError, match="budget_bytes is -1"):
        HostPool(-1)


def test_memory_goes_back_to_the_system() -> None:
    program = """
from wsync.memory.host import resident_bytes
from wsync.memory.host_pool import HostPool
pool = HostPool()
before = resident_bytes()
[block] = pool.take("actor", [100 << 20], pinned=False)
block.fill_(1)
held = resident_bytes() - before
del block
pool.put_back("actor")
pool.take("actor", [1 << 20], pinned=False)
shrunk = resident_bytes() - before
assert held > 90 << 20, held
assert shrunk < 10 << 20, shrunk
"""
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, timeout=60, check=True)
