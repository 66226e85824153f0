"""A process that owns two worker processes: prints their pids, keeps the second one busy, and waits to be killed."""

import sys
from concurrent.futures import ThreadPoolExecutor

from tests.engines.hf_syncs import endless
from wsync.adapters.engines.hf import HFEngine


def main(folder: str) -> None:
    with ThreadPoolExecutor() as pool:
        idle, busy = pool.map(HFEngine.launch, [folder, folder])
    running = endless(busy)
    print(idle.pid, busy.pid, flush=True)
    sys.stdin.read()
    del running


if __name__ == "__main__":
    main(*sys.argv[1:])
