"""vLLM in a torchrun world of its own, its two ranks parts of one replica, and an FSDP2 trainer in another world."""

import json
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed.fsdp import fully_shard

import wsync
from tests.engines.vllm_program import trainer
from tests.engines.vllm_runner import run_program
from tests.engines.vllm_served import SECRET, TURNS
from wsync.background import Background
from wsync.deadline import Deadline
from wsync.testing.ranks import LOOPBACK, Rank, run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TIMEOUT_S = 300.0
SYNCED = ("llama_b", "llama_a", "llama_b", "llama_a")


def trainer_world(me: Rank, models: Path, addresses: Sequence[str], port: int) -> list[str]:
    """One sync for each of `SYNCED`; in the last one the engine is busy."""
    board = TCPStore(LOOPBACK, port, None, False, timedelta(seconds=TIMEOUT_S), False)
    engine = wsync.RemoteEngine(*addresses, secret=SECRET, timeout_s=60) if me.rank == 0 else None
    transports = []
    for turn, name in enumerate(SYNCED):
        actor = trainer(models / name)
        for layer in actor.model.layers:
            fully_shard(layer)
        fully_shard(actor)
        if turn == TURNS:
            board.wait(["busy 0", "busy 1"], timedelta(seconds=TIMEOUT_S))
        config = wsync.SyncConfig(bucket_bytes=64 << 10, timeout_s=60, transport="gloo" if turn % 2 else "auto")
        report = wsync.sync(actor, engine, config=config)
        assert report.version == turn + 1
        transports.append(report.transport)
        if me.rank == 0:
            board.set(f"synced {turn}", "")
        if turn < TURNS:
            board.wait([f"looked {turn} {rank}" for rank in range(2)], timedelta(seconds=TIMEOUT_S))
    return transports


def test_two_ranks_of_one_engine_are_synced_from_another_world(tmp_path: Path) -> None:
    run_program("tests.engines.vllm_models", [tmp_path], tmp_path / "models.txt")
    expected = json.loads((tmp_path / "expected.json").read_text())
    listener = socket.create_server((LOOPBACK, 0))
    port = int(listener.getsockname()[1])
    patience = timedelta(seconds=TIMEOUT_S)
    board = TCPStore(LOOPBACK, port, None, True, patience, False, master_listen_fd=listener.detach())
    arguments = [tmp_path, tmp_path / "facts.json", port]
    program = Background(
        "the engine world to end",
        lambda: run_program("tests.engines.vllm_served", arguments, tmp_path / "log.txt", ranks=2, TIMEOUT_S=TIMEOUT_S),
    )
    addresses = [board.get(f"address {rank}").decode() for rank in range(2)]
    transports = run_ranks(trainer_world, 2, tmp_path, addresses, port, timeout_s=TIMEOUT_S)
    program.result(Deadline.after(TIMEOUT_S))
    assert transports[0] == ["shm", "gloo", "shm", "gloo"]
    for rank in range(2):
        facts = json.loads((tmp_path / f"facts.json.{rank}").read_text())
        assert facts["tokens"] == [expected[name] for name in SYNCED[:TURNS]]
        assert facts["first and last while busy"] == [expected[name] for name in SYNCED[TURNS - 1 :]]
        assert facts["kinds while busy"] == 2, "some tokens are of no version"
