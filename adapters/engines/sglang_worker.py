"""The half of the SGLang adapter that runs where the weights are: in each of SGLang's scheduler processes.

    Engine process                                scheduler process, one a rank
      | --- collective_rpc("wsync_answer") --------> |   SGLang's own channel: it carries a socket's name and no more
      | <------- connects to that name ------------- |   both sides ask the kernel who the other is
      | <------- here, rank ------------------------ |
      | -------- method, payload, folder ----------> |   one frame of `wsync.worker.Worker`
      | <------- its answer ------------------------ |

SGLang imports `register` in all of its processes, through an entry point of this distribution. Where that cannot be,
`load` can be passed to the engine as `custom_weight_loader`, and is then called in place of the remote procedure.
"""

import os
import socket
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from wsync import wire
from wsync.adapters.engines.launch_files import headers, safetensors_files, stream
from wsync.adapters.engines.places import Places, SettlingWorker
from wsync.deadline import Deadline
from wsync.errors import EngineStateError, MismatchError, PeerError, ProtocolError
from wsync.record import writable
from wsync.targets import Targets
from wsync.topology import Endpoint, local_endpoint
from wsync.transports.link import credentials
from wsync.walk import named_tensors
from wsync.worker import Worker

METHOD = "wsync_answer"
"""Name of the method that SGLang's Scheduler is given."""

CUSTOM_LOADER = "wsync.adapters.engines.sglang_worker.load"
"""For `sglang.Engine(custom_weight_loader=[...])`, where the entry point cannot be used."""

_PATIENCE_S = 60.0
"""For a frame of the engine's own process, which is there already or comes at once."""

_NEEDS_WEIGHTS = ("describe", "attach", "update", "read")

# A worker lives as long as its model.
_workers: "weakref.WeakKeyDictionary[torch.nn.Module, Worker]" = weakref.WeakKeyDictionary()


def register() -> None:
    """Give SGLang's Scheduler the method that wsync calls. SGLang calls this once in each of its processes."""
    module: Any = sys.modules.get("sglang.srt.managers.scheduler")
    if module is not None:  # the detokenizer has none
        setattr(module.Scheduler, METHOD, _answer_of_scheduler)


def _answer_of_scheduler(scheduler: Any, address: str) -> None:
    """A method of SGLang's Scheduler. It runs between two batches, on every rank."""
    answer(scheduler.tp_worker.model_runner.model, address, scheduler.weight_updater.offload_tags)


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """As a custom weight loader of SGLang: the name of the one "tensor" is an address."""
    answer(model, named_tensors[0][0], ())


def answer(model: torch.nn.Module, address: str, asleep: Collection[str]) -> None:
    """Fetch one control frame from the engine's process and answer it.

    Args:
        model: this rank's part of the model.
        address: abstract name of the socket on which the engine's process waits.
        asleep: SGLang's tags whose memory is released.

    Raises:
        PeerError: nobody waits there any more, or somebody else does.
    """
    from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

    rank = get_tensor_model_parallel_rank()
    deadline = Deadline.after(_PATIENCE_S)
    with _connect(address) as sock:
        wire.send_frame(sock, ("here", rank), deadline, peer="the engine's process")
        request, _ = wire.recv_frame(sock, deadline, peer="the engine's process")
        match request:
            case (str(method), bytes(payload), str(folder)):
                reply = _handle(_worker_of(model, rank, folder), method, payload, asleep)
            case _:
                raise ProtocolError("the engine's process did not ask as wsync does; are both of one version?")
        wire.send_frame(sock, reply, deadline.restart(), peer="the engine's process")


def _connect(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0{address}")
        pid, user = credentials(sock)
        if (pid, user) != (os.getppid(), os.geteuid()):
            raise PeerError(f"process {pid} of user {user} waits at this address, not the engine {os.getppid()}")
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise PeerError(f"the engine's process does not wait for an answer any more: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _worker_of(model: torch.nn.Module, rank: int, folder: str) -> Worker:
    worker = _workers.get(model)
    if worker is None:
        worker = _workers[model] = SettlingWorker(SGLangLoader(model, Path(folder) if folder else None), rank)
    return worker


def _handle(worker: Worker, method: str, payload: bytes, asleep: Collection[str]) -> bytes:
    if "weights" in asleep and method in _NEEDS_WEIGHTS:
        text = "the weights were put to sleep by engine.release_memory_occupation; resume them first"
        return wire.pack({"error": {"type": EngineStateError.__name__, "message": text, "traceback": ""}})
    return worker.handle(method, payload)


class SGLangLoader:
    """`wsync.protocols.Loader` over the model of one scheduler process."""

    whole = True

    def __init__(self, model: torch.nn.Module, folder: Path | None) -> None:
        """`folder` holds the checkpoint that the engine was started with; None if it was started with none."""
        from sglang import __version__

        self.engine = f"SGLang {__version__}"
        self._model_ref = weakref.ref(model)
        self._folder = folder
        self._places = Places(self.engine)
        self._held: Targets | None = None
        self._shapes: Mapping[str, tuple[int, ...]] | None = None

    def endpoint(self) -> Endpoint:
        """Where this worker's weights are."""
        return local_endpoint(next(self._model().parameters()).device)

    def targets(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers by SGLang's names, tied ones once."""
        return self._held if self._held is not None else self._places.tensors(self._model())

    def required(self) -> Sequence[str]:
        """Every parameter."""
        return [name for name, _, is_parameter in named_tensors(self._model()) if is_parameter]

    def accepts(self, name: str) -> bool:
        """No: SGLang makes the buffers that no checkpoint has by itself."""
        return False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """SGLang's own loader, which would pad or cut some tensors of a wrong shape."""
        model: Any = self._model()
        model.load_weights(self._of_the_right_shape(weights))

    def launch_weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """The safetensors files of the checkpoint folder; None without one."""
        files = self._files()
        return stream(files) if files else None

    def settle(self) -> None:
        """See `Places`."""
        self._places.settle(self._model())

    def begin(self) -> None:
        """Raises `EngineStateError` if a parameter has moved since `settle`."""
        self._held = self._places.recall() or self._places.check(self._model(), "since it was connected")

    def finish(self) -> None:
        """Let the model derive what it derives from its weights. Raises if a parameter has moved."""
        held, self._held = self._held, None
        model: Any = self._model()
        if held is not None:
            self._places.confirm(model, held)
        if hasattr(model, "post_load_weights"):
            with writable(self.targets()):
                model.post_load_weights()
        self._places.check(model, "while it loaded")

    def rollback(self) -> None:
        """The next sync writes every parameter again, in place."""
        self._held = None

    def _of_the_right_shape(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        if self._shapes is None:
            self._shapes = {name: shape for name, shape, _ in headers(self._files())}
        for name, tensor in weights:
            wanted = self._shapes.get(name, tuple(tensor.shape))
            if tensor.shape != wanted:
                raise MismatchError(f"its shape is {list(tensor.shape)}, at launch it was {list(wanted)}")
            yield name, tensor

    def _files(self) -> Sequence[Path]:
        return safetensors_files(self._folder) if self._folder is not None else ()

    def _model(self) -> torch.nn.Module:
        model = self._model_ref()
        if model is None:
            raise EngineStateError(f"this worker of {self.engine} was shut down")
        return model
