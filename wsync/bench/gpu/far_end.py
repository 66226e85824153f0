"""The other end of `wsync.bench.gpu.far.Far`: answers with the methods of an object."""

import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast

from wsync import wire


def answer(pipe: Connection, make: Callable[[], Any]) -> None:
    """With the methods of what `make` returns, until the other side closes the pipe.

    What fails, `make` or a method, is told with its traceback, and ends the program.
    """
    try:
        methods = make()
        pipe.send_bytes(wire.pack(("done", None)))
        while True:
            try:
                operation, *arguments = cast("tuple[str, Any]", wire.unpack(pipe.recv_bytes()))
            except (EOFError, ConnectionResetError):
                return
            pipe.send_bytes(wire.pack(("done", getattr(methods, operation)(*arguments))))
    except Exception:
        pipe.send_bytes(wire.pack(("failed", traceback.format_exc())))
        raise


def ask(pipe: Connection, value: object) -> None:
    """From within a method: have the other side heed `value`. Returns when it has."""
    pipe.send_bytes(wire.pack(("asked", value)))
    pipe.recv_bytes()
