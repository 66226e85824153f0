"""The half of the vLLM adapter that runs where the weights are: in each of vLLM's worker processes.

vLLM mixes `WorkerExtension` into its workers if `LLM` was given it as `worker_extension_cls`. Where the worker lives in
the caller's process, `worker_of` is used directly and no extension is needed.

Two ways to load. *In place*: the parameters still have the layout of the checkpoint, vLLM's loader (or a load plan)
writes into them. *Reload*: vLLM repacked weights after it loaded them (its CPU build does, and quantised models), so
that nothing can be written in place; then vLLM's layerwise reload takes every tensor.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wsync import wire
from wsync.adapters.engines import vllm_lora, vllm_reload
from wsync.adapters.engines.launch_files import safetensors_files, stream
from wsync.adapters.engines.places import Places, SettlingWorker
from wsync.adapters.engines.vllm_lora import VLLMAdapterLoader, is_adapter
from wsync.errors import EngineStateError
from wsync.loadplan import LoadPlan
from wsync.plan import TensorSpec
from wsync.protocols import Manifest
from wsync.targets import Targets
from wsync.topology import Endpoint, local_endpoint
from wsync.walk import named_modules, named_tensors
from wsync.worker import Worker

EXTENSION = "wsync.adapters.engines.vllm_worker.WorkerExtension"

_RELOAD = "vLLM repacked its weights after it loaded them; its layerwise reload takes tensors and repacks each layer"
_RELOAD_UNVERIFIED = "unverified: vLLM repacked its weights, which cannot be compared with a checkpoint any more"


class WorkerExtension:
    """Gives a vLLM worker the one method that `collective_rpc` calls. Plain bytes in and out."""

    def wsync_call(self, method: str, payload: bytes) -> bytes:
        """Answer one control frame. Errors are in the reply."""
        this: Any = self  # vLLM makes this class a base of its worker
        return worker_of(this, this.rank).handle(method, payload)


def worker_of(vllm_worker: Any, rank: int) -> Worker:
    """The `Worker` of a vLLM worker, made at the first call and kept as its attribute `wsync_worker`.

    `rank` is its place among the workers of its engine.
    """
    worker: Worker | None = getattr(vllm_worker, "wsync_worker", None)
    if worker is None:
        worker = vllm_worker.wsync_worker = _Worker(VLLMLoader(vllm_worker), rank)
    return worker


class _Worker(SettlingWorker):
    """Loads weights, or the tensors of an adapter alone: what is offered tells which."""

    def __init__(self, loader: "VLLMLoader", rank: int) -> None:
        super().__init__(loader, rank)
        self._vllm = loader

    def _record(self, specs: Sequence[TensorSpec]) -> LoadPlan:
        self._loader = VLLMAdapterLoader(self._vllm, specs) if is_adapter(specs) else self._vllm
        return super()._record(specs)

    def _examine(self, specs: Sequence[TensorSpec], void: bool) -> Manifest:
        found = super()._examine(specs, void)
        if isinstance(self._loader, VLLMAdapterLoader):
            return replace(found, problems=(*found.problems, *self._loader.problems))
        if not self._vllm.repacked:
            return found
        return replace(found, through_loader=dict.fromkeys(found.through_loader, _RELOAD), verified=_RELOAD_UNVERIFIED)

    def handle(self, method: str, payload: bytes) -> bytes:
        if method == "read" and self._loader is self._vllm and self._vllm.repacked:
            message = f"{self._vllm.engine} repacked its weights after loading them; they cannot be shown"
            return wire.pack({"error": {"type": "UnsupportedError", "message": message, "traceback": ""}})
        return super().handle(method, payload)


class VLLMLoader:
    """`wsync.protocols.Loader` over the model of one vLLM worker."""

    whole = True

    def __init__(self, vllm_worker: Any) -> None:
        from vllm import __version__

        self.engine = f"vLLM {__version__}"
        self._worker = weakref.ref(vllm_worker)
        self._in_place: bool | None = None
        self._stand_ins: vllm_reload.StandIns | None = None
        self._reloading = False
        self._places = Places(self.engine)
        self._held: Targets | None = None
        self._attention = _Attention()
        # Never read. In a rehearsal it is written for each tensor, which tells the dry run that more happens to it
        # than a copy into a parameter: the reload keeps it and repacks it.
        self._elsewhere = torch.empty((), dtype=torch.uint8)

    def endpoint(self) -> Endpoint:
        """Where this worker's weights are."""
        return local_endpoint(self.worker().device)

    @property
    def repacked(self) -> bool:
        """Whether vLLM changed the layout of parameters after loading them, so that none can be written in place."""
        return self._rehearsal() is not None

    def targets(self) -> Mapping[str, torch.Tensor]:
        """Parameters and buffers by vLLM's names, tied ones once; stand-ins where vLLM repacked the weights."""
        if (stand_ins := self._rehearsal()) is not None:
            return stand_ins.targets
        return self._held if self._held is not None else self._places.tensors(self._model())

    def required(self) -> Sequence[str]:
        """Every parameter."""
        if (stand_ins := self._rehearsal()) is not None:
            return stand_ins.required
        return [name for name, _, is_parameter in named_tensors(self._model()) if is_parameter]

    def accepts(self, name: str) -> bool:
        """No: vLLM makes the buffers that no checkpoint has by itself."""
        return False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """vLLM's own loader. Outside of an attempt a repacked model is rehearsed on stand-ins."""
        model: Any = self._model()
        stand_ins = self._rehearsal()
        with self._context(), vllm_lora.loadable(self.worker(), model):
            if stand_ins is None:
                model.load_weights(weights)
            elif self._reloading:
                model.load_weights(weights)  # it keeps them until their layer is complete: they are its own
            else:
                with stand_ins.placed(model):
                    model.load_weights(self._marked(weights))

    def launch_weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """The safetensors files of the checkpoint folder; None without one, or where live bytes are repacked."""
        worker = self.worker()
        folder = Path(worker.model_config.model)
        if worker.load_config.load_format == "dummy" or self.repacked or not folder.is_dir():
            return None
        files = safetensors_files(folder)
        return stream(files) if files else None

    def settle(self) -> None:
        """A new connection: wherever parameters lie now is where they must stay."""
        self._places.settle(self._model())

    def begin(self) -> None:
        """Open a reload where one is needed. Raises `EngineStateError` if a parameter has moved since `settle`."""
        model = self._model()
        self._held = self._places.recall() or self._places.check(model, "since it was connected")
        if self.repacked:
            self._reloading = True
            with self._context():
                vllm_reload.begin(model)

    def finish(self) -> None:
        """Let attention layers and reloaded layers derive what they derive. Raises if a parameter has moved.

        An adapter that was synced for the old base weights goes.
        """
        held, self._held = self._held, None
        worker, model = self.worker(), self._model()
        if held is not None and not self._reloading:
            self._places.confirm(model, held)
        vllm_lora.drop(worker)
        with self._context():
            if self._reloading:
                vllm_reload.finish(model, worker.model_config)
                self._reloading = False
                self.wait_for_device()
            else:
                self._attention.process(model, worker.model_config, held.key if held is not None else None)
        self._places.check(model, "while it loaded")

    def rollback(self) -> None:
        """Close a failed reload, so that the next one starts afresh."""
        self._held = None
        if self._reloading:
            self._reloading = False
            with self._context():
                vllm_reload.rollback(self._model())
                self.wait_for_device()

    def wait_for_device(self) -> None:
        """Where the targets were stand-ins in host memory, nobody else waits for what was made of them."""
        device = self.worker().device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def worker(self) -> Any:
        """vLLM's worker object. Raises `EngineStateError` if it is gone."""
        worker = self._worker()
        if worker is None:
            raise EngineStateError(f"this worker of {self.engine} was shut down")
        return worker

    def _marked(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._elsewhere.zero_()
            yield name, tensor

    def _rehearsal(self) -> vllm_reload.StandIns | None:
        """The stand-ins of a repacked model; None if its parameters can be written in place."""
        if self._in_place is None:
            model = self._model()
            self._in_place = not vllm_reload.repacked(model)
            self._stand_ins = None if self._in_place else vllm_reload.StandIns(model)
        return self._stand_ins

    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.worker().get_model()
        return model

    @contextmanager
    def _context(self) -> Iterator[None]:
        """What vLLM's loaders expect of the thread that calls them."""
        from vllm.config import set_current_vllm_config

        worker = self.worker()
        with ExitStack() as stack:
            if worker.device.type == "cuda":
                stack.enter_context(torch.cuda.device(worker.device))
            stack.enter_context(set_current_vllm_config(worker.vllm_config))
            stack.enter_context(torch.no_grad())
            yield


class _Attention:
    """The attention layers of a model: found by a walk through all modules, and again when anything has changed."""

    def __init__(self) -> None:
        self._layers: Sequence[weakref.ref[torch.nn.Module]] = ()
        self._key: object = None

    def process(self, model: torch.nn.Module, model_config: Any, key: object) -> None:
        """What a reload does for them: MLA derives weights from others, scales get their defaults.

        Quantisation methods are left alone: where one changes weights after loading, the model is not loaded in place.

        Args:
            model: the model.
            model_config: vLLM's.
            key: the same object for as long as the model has the same modules.
        """
        if key is None or key is not self._key:
            self._layers, self._key = list(map(weakref.ref, _attention_layers(model))), key
        for layer in self._layers:
            process = getattr(layer(), "process_weights_after_loading", None)
            if process is not None:
                process(model_config.dtype)


def _attention_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Those that may derive something from weights."""
    from vllm.model_executor.layers import attention

    # vLLM 0.26 has the list of classes instead of the question.
    ask = getattr(attention, "is_deferred_attention_layer", None)
    kinds = (attention.Attention, attention.MLAAttention, attention.MMEncoderAttention)
    for _, layer in named_modules(model):
        if (ask(layer) if ask is not None else isinstance(layer, kinds)) and not _derives_nothing(layer):
            yield layer


def _derives_nothing(layer: Any) -> bool:
    """Whether all that a plain attention layer would do is to set its scales to 1, of which no checkpoint knows.

    That costs several launches a layer, and undoes scales that vLLM has measured.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionImplBase

    name = "process_weights_after_loading"
    plain = getattr(type(layer), name) is getattr(Attention, name) and layer.quant_config is None
    return plain and getattr(type(layer.impl), name) is getattr(AttentionImplBase, name)
