"""A process that holds a bare engine, and what the trainer's first rank asks of it beside the syncs.

Syncs go through `wsync.serve`, as a user's would. The pipe is for the loops and ceilings that wsync is compared with,
and for looking at the bytes afterwards:

    ready                           -> address and secret of the served engine
    spoil, digests                  see `BareEngine`
    group    path, timeout_s        form a gloo group with the asker
    raw      sizes                  take broadcasts of so many bytes each, and throw them away
    each     names, how             for each name a message (name, shape, dtype), then the tensor: "broadcast" or
                                    "message"; every one is loaded and answered before the next

The answer is ("ok", value) or ("error", traceback). The process ends when its pipe does.
"""

import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import FileStore

import wsync
from wsync.bench.cases import Shapes
from wsync.bench.ceilings import bytes_of
from wsync.bench.receiver import BareEngine
from wsync.bench.weights import ENGINE_SEED, random_tensors
from wsync.errors import PeerError, SyncTimeout
from wsync.transports.gloo import Broadcast, gloo_broadcast

_LOOPBACK = "127.0.0.1"

Pairs = Iterable[tuple[str, torch.Tensor]]


class Neighbour:
    """The first rank's end of the pipe. Every wait for the other process ends at its death or after `timeout_s`."""

    def __init__(self, pipe: Connection, timeout_s: float) -> None:
        self._pipe, self._timeout_s = pipe, timeout_s
        self._broadcast: Broadcast | None = None
        address, secret = self._hear("be ready")
        self.engine = wsync.RemoteEngine(address, secret=secret, timeout_s=timeout_s)

    def spoil(self) -> None:
        """See `BareEngine`."""
        self._ask("spoil")

    def digests(self) -> dict[str, str]:
        """See `BareEngine`."""
        found: dict[str, str] = self._ask("digests")
        return found

    def broadcast_raw(self, pieces: Sequence[torch.Tensor]) -> None:
        """Broadcast these bytes (uint8), and nothing else."""
        broadcast = self._joined()
        self._tell("raw", [piece.numel() for piece in pieces])
        for piece in pieces:
            broadcast(piece)
        self._hear("take raw bytes")

    def broadcast_each(self, pairs: Pairs) -> None:
        """One message, one broadcast and one answer for each tensor."""
        broadcast = self._joined()
        self._tell("each", "broadcast")
        for name, tensor in pairs:
            self._pipe.send((name, tuple(tensor.shape), tensor.dtype))
            broadcast(tensor.contiguous().view(-1).view(torch.uint8))
            self._hear(f"load {name}")
        self._pipe.send(None)
        self._hear("end its loop")

    def message_each(self, pairs: Pairs) -> None:
        """One message with all bytes, and one answer, for each tensor."""
        self._tell("each", "message")
        for name, tensor in pairs:
            self._pipe.send((name, tuple(tensor.shape), tensor.dtype))
            self._pipe.send_bytes(bytes_of(tensor.contiguous()).data)
            self._hear(f"load {name}")
        self._pipe.send(None)
        self._hear("end its loop")

    def close(self) -> None:
        """Hang up."""
        self.engine.disconnect()
        self._pipe.close()

    def _joined(self) -> Broadcast:
        if self._broadcast is None:
            with tempfile.TemporaryDirectory() as folder:
                path = f"{folder}/store"
                self._tell("group", path, self._timeout_s)
                self._broadcast = gloo_broadcast(FileStore(path, 2), 0, 2, _LOOPBACK, self._timeout_s)
                self._hear("join a group")
        return self._broadcast

    def _tell(self, op: str, *args: object) -> None:
        self._pipe.send((op, *args))

    def _ask(self, op: str, *args: object) -> Any:
        self._tell(op, *args)
        return self._hear(op)

    def _hear(self, doing: str) -> Any:
        if not self._pipe.poll(self._timeout_s):
            raise SyncTimeout(f"gave up after {self._timeout_s:g} s: still waiting for the engine's process to {doing}")
        try:
            outcome, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise PeerError(f"the engine's process died; it was to {doing}") from None
        if outcome != "ok":
            raise PeerError(f"the engine's process could not {doing}", value)
        return value


@contextmanager
def hosted(shapes: Shapes, dtype: torch.dtype) -> Iterator[Connection]:
    """An engine's process. What is yielded is for `Neighbour`, which may live in any process."""
    ours, theirs = mp.Pipe()
    process = mp.get_context("forkserver").Process(target=_main, args=(theirs, shapes, dtype), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.kill()
        process.join()
        process.close()


def _main(pipe: Connection, shapes: Shapes, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError), pipe:
        try:
            engine = BareEngine(dict(random_tensors(shapes, ENGINE_SEED, dtype)))
            with wsync.serve(engine) as served:
                pipe.send(("ok", (served.address, served.secret)))
                _serve(_Host(pipe, engine), pipe)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception:
            pipe.send(("error", traceback.format_exc()))


def _serve(host: "_Host", pipe: Connection) -> None:
    while True:
        op, *args = pipe.recv()
        pipe.send(("ok", getattr(host, op)(*args)))


class _Host:
    """Answers of the engine's process."""

    def __init__(self, pipe: Connection, engine: BareEngine) -> None:
        self._pipe, self._engine = pipe, engine
        self._broadcast: Broadcast | None = None
        self.spoil, self.digests = engine.spoil, engine.digests

    def group(self, path: str, timeout_s: float) -> None:
        self._broadcast = gloo_broadcast(FileStore(path, 2), 1, 2, _LOOPBACK, timeout_s)

    def raw(self, sizes: Sequence[int]) -> None:
        assert self._broadcast is not None
        room = torch.empty(max(sizes, default=0), dtype=torch.uint8)
        for size in sizes:
            self._broadcast(room[:size])

    def each(self, how: str) -> None:
        take: Callable[[torch.Tensor], object] = self._take_message
        if how == "broadcast":
            assert self._broadcast is not None
            take = self._broadcast
        while (item := self._pipe.recv()) is not None:
            name, shape, dtype = item
            tensor = torch.empty(shape, dtype=dtype)
            take(tensor.view(-1).view(torch.uint8))
            self._engine.loader.load_weights([(name, tensor)])
            self._pipe.send(("ok", None))

    def _take_message(self, room: torch.Tensor) -> None:
        self._pipe.recv_bytes_into(room.numpy().data)
