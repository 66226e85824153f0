"""The other end of `wsync.bench.gpu.far.Far`: answers with the methods of an object."""

import traceback
from multiprocessing.connection import Connection
from typing import Any, cast

from wsync import wire


def answer(pipe: Connection, methods: Any) -> None:
    """Until the other side closes the pipe. A method that fails is told with its traceback, and ends the program."""
    try:
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
