"""Program for torchrun: two ranks hold parts of one LLM and serve them. `-m tests.engines.vllm_served MODELS OUT PORT`.

The test holds a store at PORT: here go the addresses, from there comes what was synced.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import tests.engines.vllm_plain  # noqa: F401 - before the first engine
import wsync
from tests.engines.vllm_program import Facts, start, tokens, write

SECRET = "of the two ranks that serve one LLM"
TURNS = 3


def go_on(store: TCPStore, key: str) -> bool:
    """Whether `key` is not there yet, with one answer for all ranks: they must generate in step."""
    here = torch.tensor(int(store.check([key])))
    dist.all_reduce(here, op=dist.ReduceOp.MAX)
    return not here


def main(models: Path, out: Path, port: int) -> None:
    """Serve until the last sync; each rank writes its own facts."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    llm = start(models / "llama_a", tensor_parallel_size=2, distributed_executor_backend="external_launcher")
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=300), False)
    facts: Facts = {"tokens": []}
    with wsync.serve(llm, secret=SECRET) as served:
        store.set(f"address {rank}", served.address)
        for turn in range(TURNS):
            store.wait([f"synced {turn}"], timedelta(seconds=300))
            with served.using():
                facts["tokens"].append(tokens(llm))
            store.set(f"looked {turn} {rank}", "")
        seen = []
        while go_on(store, f"synced {TURNS}"):
            with served.using():
                seen.append(tokens(llm))
            store.set(f"busy {rank}", "")
        with served.using():
            seen.append(tokens(llm))
        facts["first and last while busy"] = [seen[0], seen[-1]]
        facts["kinds while busy"] = len({str(one) for one in seen})
    write(out.with_name(f"{out.name}.{rank}"), facts)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
