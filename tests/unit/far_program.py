"""Program: a stand-in for checkpoint-engine's server, and for programs that do not start."""

import sys
from multiprocessing.connection import Connection

from wsync.bench.gpu.far_end import answer, ask
from wsync.bench.gpu.models import SHAPES


class StandIn:
    """The methods of `moonshot_server.Server`."""

    def __init__(self, pipe: Connection, shape: str) -> None:
        if shape not in SHAPES:
            raise ValueError(f"cannot make {shape}")
        self._pipe = pipe

    def randomize(self, seed: int) -> None:
        """Nothing."""

    def register(self) -> float:
        """Seconds."""
        return 0.25

    def update(self) -> float:
        """Asks twice, and takes half a second."""
        ask(self._pipe, {"GPU-0": "ipc://a"})
        ask(self._pipe, {"GPU-1": "ipc://b"})
        return 0.5


if __name__ == "__main__":
    pipe = Connection(int(sys.argv[1]))
    answer(pipe, lambda: StandIn(pipe, sys.argv[2]))
