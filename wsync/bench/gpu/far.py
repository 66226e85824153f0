"""A program of its own, on another GPU if not told otherwise, and the pipe to it.

this process                       wsync.bench.gpu.far_vllm, raw_peer, moonshot_server
tell(operation, ...) ------------> method of that name
heed(value)          <------------ what the method asks for, if it does
                     ------------> heeded
hear()               <------------ what it returned, or its traceback
"""

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, cast

from wsync import wire
from wsync.errors import PeerError

LOOPBACK = "127.0.0.1"
GPU = 1
"""The one of this machine's that such a program has. This process's own is the first."""

_THERE = (f"CUDA_VISIBLE_DEVICES={GPU}", "VLLM_ENABLE_V1_MULTIPROCESSING=0")
_PATIENCE_S = 200.0
_END_S = 10.0


class Far:
    """Use it as a context manager: the program ends with the block."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        settings: Sequence[str] = _THERE,
        heed: Callable[[Any], object] | None = None,
    ) -> None:
        """Start `python -m module FD ...`. The first `hear` tells that it is ready.

        Args:
            settings: of its environment; by default it sees the other GPU alone, with vLLM's core in its process.
            heed: gets what it asks for while it answers.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            command = ["env", *settings, sys.executable, "-m", module, str(theirs.fileno()), *arguments]
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
        self._pipe = Connection(ours.detach())
        self._module, self._heed = module, heed

    def __enter__(self) -> "Far":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tell(self, operation: str, *arguments: object) -> None:
        """Have it begin. Answers come in order; whoever is not interested hears them later."""
        self._pipe.send_bytes(wire.pack((operation, *arguments)))

    def hear(self) -> Any:
        """The next answer, lists in it as tuples.

        Raises `PeerError` with its traceback if it failed, died or takes too long.
        """
        while True:
            kind, value = self._next()
            if kind == "done":
                return value
            if kind == "failed" or self._heed is None:
                raise PeerError(f"{self._module} {kind}", str(value))
            self._heed(value)
            self._pipe.send_bytes(wire.pack(("heeded",)))

    def _next(self) -> tuple[str, Any]:
        if not self._pipe.poll(_PATIENCE_S):
            raise PeerError(f"{self._module} said nothing for {_PATIENCE_S:g} s")
        try:
            return cast("tuple[str, Any]", wire.unpack(self._pipe.recv_bytes()))
        except (EOFError, ConnectionResetError):
            raise PeerError(f"{self._module} died") from None

    def ask(self, operation: str, *arguments: object) -> Any:
        """`tell` and `hear`."""
        self.tell(operation, *arguments)
        return self.hear()


def free_port() -> int:
    """A port of this host that nobody listens at just now."""
    with socket.create_server((LOOPBACK, 0)) as sock:
        return int(sock.getsockname()[1])
