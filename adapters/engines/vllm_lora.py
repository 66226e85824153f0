"""The adapter of a vLLM worker that was started with `enable_lora=True`.

    wsync.sync(peft_model, llm, config=wsync.SyncConfig(lora="adapter"))
    llm.generate(prompts, sampling_params, lora_request=lora_request())

vLLM keeps each adapter in host memory, and those in use also in its layers, scaled and cut for the worker. What arrives
is collected in stand-ins, which nothing reads. When all of it is there, an adapter made from copies takes the place of
the last one.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from wsync.adapters.trainers.lora_adapter import PREFIX, SCALING
from wsync.errors import EngineStateError, MismatchError
from wsync.plan import TensorSpec
from wsync.topology import Endpoint, local_endpoint

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

NAME = "wsync"
"""Of the adapter, in vLLM."""

ADAPTER_ID = 0x7773
"""vLLM knows adapters by number. Do not give this one to another adapter."""

_FACTORS = ("lora_A.weight", "lora_B.weight", SCALING)


def lora_request() -> "LoRARequest":
    """What `generate` and `add_request` take as `lora_request` to answer with the adapter of the last sync.

    Before the first sync vLLM finds no such adapter and says so.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, ADAPTER_ID, NAME)


def drop(vllm_worker: Any) -> None:
    """Forget the adapter of the last sync: the base weights that it belongs to are replaced."""
    if vllm_worker.vllm_config.lora_config is not None:
        _manager(vllm_worker).remove_adapter(ADAPTER_ID)


def is_adapter(specs: Sequence[TensorSpec]) -> bool:
    """Whether these are the tensors of an adapter alone."""
    return any(spec.name.endswith(f".{SCALING}") for spec in specs)


@dataclass(slots=True)
class _Layer:
    """What an adapter adds to one layer: stand-ins by the last part of their names."""

    parts: dict[str, torch.Tensor] = field(default_factory=dict)

    def copies(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """A, B and the factor of their product."""
        a, b, scaling = (self.parts[part] for part in _FACTORS)
        return a.clone(), b.clone(), float(scaling)


class VLLMAdapterLoader:
    """`wsync.protocols.Loader` for the adapter of one vLLM worker. It leaves the base weights alone."""

    whole = False

    def __init__(self, vllm_worker: Any, specs: Sequence[TensorSpec]) -> None:
        """Make stand-ins for `specs`.

        Attributes:
            problems: a sentence for each thing that keeps this vLLM from taking them.
        """
        from vllm import __version__

        self.engine = f"vLLM {__version__}"
        self._worker = weakref.ref(vllm_worker)
        self._config = vllm_worker.vllm_config.lora_config
        self._layers: dict[str, _Layer] = {}
        self._targets: dict[str, torch.Tensor] = {}
        for spec in specs:
            layer, part = _split(spec.name)
            factor = self._config is not None and part != SCALING
            stand_in = torch.zeros(spec.shape, dtype=self._config.lora_dtype if factor else spec.dtype)
            self._targets[spec.name] = self._layers.setdefault(layer, _Layer()).parts[part] = stand_in
        self.problems = tuple(self._problems())

    def endpoint(self) -> Endpoint:
        """Where this worker's weights are."""
        return local_endpoint(self._alive().device)

    def targets(self) -> Mapping[str, torch.Tensor]:
        """The stand-ins, in host memory, by the names of PEFT's files."""
        return self._targets

    def required(self) -> Sequence[str]:
        """All of them."""
        return list(self._targets)

    def accepts(self, name: str) -> bool:
        """Adapters have no buffers."""
        return False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each to its stand-in. Raises `MismatchError` for an unknown name."""
        for name, tensor in weights:
            if name not in self._targets:
                raise MismatchError(f"{name}: the adapter that was announced has no such tensor")
            self._targets[name].copy_(tensor)

    def launch_weights(self) -> None:
        """None: vLLM starts without an adapter."""

    def begin(self) -> None:
        """Nothing to prepare."""

    def finish(self) -> None:
        """Let an adapter of what has arrived take the place of the last."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        manager, layers = self._manager(), {}
        for name, layer in self._layers.items():
            a, b, scaling = layer.copies()
            rank = a.shape[0]
            layers[self._named(name)] = LoRALayerWeights(self._named(name), rank, rank, a, b, scaling)
        adapter = LoRAModel(ADAPTER_ID, max(layer.rank for layer in layers.values()), layers)
        manager.remove_adapter(ADAPTER_ID)
        if len(manager) >= manager.capacity:
            manager.remove_oldest_adapter()
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)
        device = self._alive().device
        if device.type == "cuda":  # the targets are stand-ins, in host memory
            torch.cuda.current_stream(device).synchronize()

    def rollback(self) -> None:
        """Nothing to undo."""

    def _problems(self) -> Iterator[str]:
        if self._config is None:
            yield f"{self.engine} was started without adapters: give it enable_lora=True and max_lora_rank"
            return
        sizes, most = _sizes(self._manager()), self._config.max_lora_rank
        for name, layer in self._layers.items():
            strange = [part for part in layer.parts if part not in _FACTORS]
            lacking = [part for part in _FACTORS if part not in layer.parts]
            if strange:
                yield f"{name}.{strange[0]}: {self.engine} takes nothing from memory but A and B of linear layers"
            elif self._named(name) not in sizes:
                yield f"{name}: {self.engine} has no such layer that takes adapters"
            elif lacking:
                yield f"{name}: {', '.join(lacking)} is missing"
            elif (known := sizes[self._named(name)]) is None:
                yield f"{name}: {self.engine} takes adapters from memory for linear layers only"
            else:
                a, b = layer.parts[_FACTORS[0]], layer.parts[_FACTORS[1]]
                (inputs, outputs), rank = known, a.shape[0]
                if a.shape != (rank, inputs) or b.shape != (outputs, rank):
                    shapes = f"A {list(a.shape)} and B {list(b.shape)}"
                    yield f"{name}: {shapes} do not fit {inputs} inputs and {outputs} outputs"
                elif rank > most:
                    yield f"{name}: its rank is {rank}, the engine's max_lora_rank is {most}"

    def _named(self, layer: str) -> str:
        """vLLM's name of a layer."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        mapper: Any = getattr(self._manager().model, "hf_to_vllm_mapper", None)
        # vLLM 0.26 renames by the whole mapper.
        renaming = mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper
        name: str = parse_fine_tuned_lora_name(f"{PREFIX}{layer}.{_FACTORS[0]}", renaming)[0]
        return name

    def _manager(self) -> Any:
        return _manager(self._alive())

    def _alive(self) -> Any:
        worker = self._worker()
        if worker is None:
            raise EngineStateError(f"this worker of {self.engine} was shut down")
        return worker


def _manager(vllm_worker: Any) -> Any:
    return vllm_worker.model_runner.lora_manager._adapter_manager


def _split(name: str) -> tuple[str, str]:
    """The layer that a tensor belongs to, and the rest of its name."""
    name = name.removeprefix(PREFIX)
    head, mark, _ = name.rpartition(".lora_")
    layer = head if mark else name.rpartition(".")[0]
    return layer, name.removeprefix(f"{layer}.")


def _sizes(manager: Any) -> Mapping[str, tuple[int, int] | None]:
    """Inputs and outputs, over all workers, of each layer that takes adapters; None if it is not a linear one."""
    from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear

    found: dict[str, tuple[int, int] | None] = {}
    for name, module in manager.modules.items():
        base, parts = getattr(module, "base_layer", None), manager.packed_modules.get(name, ())
        if not isinstance(base, LinearBase):
            found |= dict.fromkeys(parts or [name])
            continue
        if isinstance(base, QKVParallelLinear):
            key_value = base.total_num_kv_heads
            outputs = [
                base.total_num_heads * base.head_size,
                key_value * base.head_size,
                key_value * getattr(base, "v_head_size", base.head_size),
            ]
        else:
            outputs = list(getattr(base, "output_sizes", [base.output_size]))
        found |= {part: (base.input_size, out) for part, out in zip(parts or [name], outputs, strict=True)}
    return found
