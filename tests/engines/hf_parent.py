"""A process that owns two worker processes: prints their pids, keeps the second one busy, and waits to be killed.

It also forks a child, as data loaders do, which lives on and has a copy of every open descriptor.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.engines.hf_syncs import endless
from wsync.adapters.engines.hf import HFEngine


def main(folder: str) -> None:
    with ThreadPoolExecutor() as pool:
        idle, busy = pool.map(HFEngine.launch, [folder, folder])
    running = endless(busy)
    if not os.fork():
        sys.stdin.read()
        os._exit(0)
    print(idle.pid, busy.pid, flush=True)
    sys.stdin.read()
    del running


if __name__ == "__main__":
    main(*sys.argv[1:])
