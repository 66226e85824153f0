"""The worker process of the embedded engine: `python -m wsync.adapters.engines.hf_worker <descriptor>`.

Started by `wsync.adapters.engines.hf_process`, which says what travels on the descriptor. The first thread only reads
the socket: it ends the process at the end of file, whatever the others are doing.
"""

import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from wsync import wire
from wsync.adapters.engines.hf_memory import own_memory
from wsync.adapters.engines.hf_model import LocalModel
from wsync.deadline import FOREVER_S, Deadline
from wsync.errors import PeerError, WsyncError
from wsync.extras import importing


class _Server:
    """Answers requests, each on a thread of its own; there are never more than the engine has in flight."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()
        self._stopping = False
        self._model: nn.Module | None = None
        self._local: LocalModel | None = None

    def serve(self) -> None:
        """Until the engine is gone: then `PeerError`."""
        while True:
            message, _ = wire.recv_frame(self._socket, Deadline.after(FOREVER_S), peer="the engine's process")
            request: Mapping[str, Any] = message  # type: ignore[assignment]
            if request["op"] == "stop":
                self._loaded().stop(**request["args"])
            else:
                threading.Thread(target=self._answer, args=(request,), daemon=True).start()

    def _answer(self, request: Mapping[str, Any]) -> None:
        try:
            answer = {"id": request["id"], "ok": self._run(request["op"], request["args"])}
        except Exception as error:
            words = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
            answer = {"id": request["id"], "error": words}
        with self._sending:
            wire.send_frame(self._socket, answer, Deadline.after(FOREVER_S), peer="the engine's process")

    def _run(self, op: str, args: Mapping[str, Any]) -> object:
        if op == "handle":
            return self._loaded().handle(**args, timeout_s=None)
        if op == "generate":
            return self._loaded().generate(**args, ended=_nothing)
        if op == "load":
            self._load(**args)
        elif op == "sleep":
            self._loaded().sleep(**args, timeout_s=FOREVER_S)
        elif op == "wake_up":
            self._loaded().wake_up(timeout_s=FOREVER_S)
        else:
            raise WsyncError(f"there is no request {op!r}")
        return None

    def _load(self, folder: str, dtype: Any, device: str) -> None:
        with importing("hf", "the worker process of an hf engine"):
            from transformers import AutoModelForCausalLM
            from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", local_files_only=True)
        model = model.to(device).eval()
        own_memory(model)  # a trainer may write its next checkpoint over this one
        self._model, self._local = model, LocalModel(model, Path(folder))

    def _loaded(self) -> LocalModel:
        if self._local is None:
            raise WsyncError("no model is loaded yet")
        return self._local


def _nothing() -> None:
    pass


def main(descriptor: int) -> None:
    """Serve until the other end closes. Never returns: running generations are cut off."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine's process; its end is ours
    status = 1
    try:
        _Server(socket.socket(fileno=descriptor)).serve()
    except PeerError:
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
