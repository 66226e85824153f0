"""Program for torchrun, started twice: `-m tests.distributed.worlds_program ROLE FOLDER PORT`, an engine world and a
trainer world. The test holds a store at PORT, over which it hands on addresses; the worlds know nothing else."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import wsync
from tests.distributed.worlds import (
    BUCKET_BYTES,
    PROMPTS,
    SECRET,
    bytes_of_weights,
    llama,
    optimizer_step,
    remote,
    sharded,
    tokens_of,
)
from wsync.adapters.engines.hf import HFEngine

SYNCS = 3
PATIENCE = timedelta(seconds=200)


def engine_world(board: TCPStore, rank: int) -> list[object]:
    """Each rank serves a model; what it generates after each sync, and the fingerprint of its weights at the end."""
    model = llama(100 + rank)
    tokens: list[object] = []
    with wsync.serve(model, secret=SECRET) as served:
        board.set(f"address {rank}", served.address)
        for turn in range(SYNCS):
            board.wait([f"synced {turn}"], PATIENCE)
            with served.using():
                tokens.append(HFEngine(model).generate(PROMPTS, max_new_tokens=8))
            board.set(f"looked {turn} {rank}", "")
    return [*tokens, fingerprint(bytes_of_weights(model))]


def trainer_world(board: TCPStore, rank: int) -> list[object]:
    """FSDP2 with a real step before each sync; what a model with these weights generates, and their fingerprint."""
    actor = sharded(1)
    engines = remote([board.get(f"address {part}").decode() for part in range(2)]) if rank == 0 else None
    tokens: list[object] = []
    for turn in range(SYNCS):
        optimizer_step(actor)
        config = wsync.SyncConfig(bucket_bytes=BUCKET_BYTES, transport="gloo", timeout_s=60, verify="digest")
        wsync.sync(actor, engines, config=config)
        weights = bytes_of_weights(actor)
        tokens.append(tokens_of(weights))
        if rank == 0:
            board.set(f"synced {turn}", "")
        board.wait([f"looked {turn} {part}" for part in range(2)], PATIENCE)
    return [*tokens, fingerprint(weights)]


def fingerprint(weights: dict[str, bytes]) -> dict[str, str]:
    """Every bit, short enough for JSON."""
    from hashlib import sha256

    return {name: sha256(data).hexdigest() for name, data in weights.items()}


def main(role: str, folder: Path, port: int) -> None:
    """Play the role, see that the default group still works, and write what was found."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    board = TCPStore("127.0.0.1", port, None, False, PATIENCE, False)
    found = {"engines": engine_world, "trainer": trainer_world}[role](board, rank)
    total = torch.tensor(1)
    dist.all_reduce(total)
    (folder / f"{role} {rank}").write_text(json.dumps([*found, int(total)]))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a gloo rank that runs the interpreter's own exit may abort in a destructor


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
