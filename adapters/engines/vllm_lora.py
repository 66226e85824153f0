"""The adapter of a vLLM worker that was started with `enable_lora=True`.

    wsync.sync(peft_model, llm, config=wsync.SyncConfig(lora="adapter"))
    llm.generate(prompts, sampling_params, lora_request=lora_request())

vLLM keeps each adapter in host memory, and those in use also in its layers, scaled and cut for the worker. What arrives
is collected in stand-ins, which nothing reads. When all of it is there, an adapter made from copies takes the place of
the last one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from wsync.adapters.trainers.lora_adapter import PREFIX, SCALING, layer_of
from wsync.errors import MismatchError
from wsync.plan import TensorSpec
from wsync.topology import Endpoint

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from wsync.adapters.engines.vllm_worker import VLLMLoader

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


@contextmanager
def loadable(vllm_worker: Any, model: torch.nn.Module) -> Iterator[None]:
    """Context in which vLLM's loader finds the weights below layers that take adapters.

    Checkpoints name the layers below, and the loader of vLLM 0.26 does not look there.
    """
    around = [] if vllm_worker.vllm_config.lora_config is None else list(_opaque(model))
    for layer in around:
        layer.load_weights = partial(_load_below, layer)
    try:
        yield
    finally:
        for layer in around:
            del layer.load_weights


def is_adapter(specs: Sequence[TensorSpec]) -> bool:
    """Whether these are the tensors of an adapter alone."""
    return any(spec.name.endswith(f".{SCALING}") for spec in specs)


class VLLMAdapterLoader:
    """`wsync.protocols.Loader` for the adapter of one vLLM worker. It leaves the base weights alone."""

    whole = False

    def __init__(self, base: "VLLMLoader", specs: Sequence[TensorSpec]) -> None:
        """Make stand-ins for `specs`, for the worker of `base`.

        Attributes:
            problems: a sentence for each thing that keeps this vLLM from taking them.
        """
        self.engine = base.engine
        self._base = base
        self._config = base.worker().vllm_config.lora_config
        self._layers: dict[str, dict[str, torch.Tensor]] = {}
        self._targets: dict[str, torch.Tensor] = {}
        for spec in specs:
            layer = layer_of(spec.name)
            part = spec.name.removeprefix(f"{layer}.")
            factor = self._config is not None and part != SCALING
            stand_in = torch.zeros(spec.shape, dtype=self._config.lora_dtype if factor else spec.dtype)
            self._targets[spec.name] = self._layers.setdefault(layer, {})[part] = stand_in
        self.problems = tuple(self._problems())

    def endpoint(self) -> Endpoint:
        """Where this worker's weights are."""
        return self._base.endpoint()

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

        manager, layers = _manager(self._base.worker()), {}
        for layer, parts in self._layers.items():
            a, b, scaling = (parts[part].clone() for part in _FACTORS)
            name, rank = _named(manager, layer), a.shape[0]
            layers[name] = LoRALayerWeights(name, rank, rank, a, b, float(scaling))
        adapter = LoRAModel(ADAPTER_ID, max(layer.rank for layer in layers.values()), layers)
        manager.remove_adapter(ADAPTER_ID)
        if len(manager) >= manager.capacity:
            manager.remove_oldest_adapter()
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)
        self._base.wait_for_device()

    def rollback(self) -> None:
        """Nothing to undo."""

    def _problems(self) -> Iterator[str]:
        if self._config is None:
            yield f"{self.engine} was started without adapters: give it enable_lora=True and max_lora_rank"
            return
        manager = _manager(self._base.worker())
        sizes = _sizes(manager)
        for layer, parts in self._layers.items():
            name, known = layer.removeprefix(PREFIX), sizes.get(_named(manager, layer), ())
            strange = [part for part in parts if part not in _FACTORS]
            lacking = [part for part in _FACTORS if part not in parts]
            if strange:
                yield f"{name}.{strange[0]}: {self.engine} takes nothing from memory but A and B of linear layers"
            elif known == ():
                yield f"{name}: {self.engine} has no such layer that takes adapters"
            elif lacking:
                yield f"{name}: {', '.join(lacking)} is missing"
            elif known is None:
                yield f"{name}: {self.engine} takes adapters from memory for linear layers only"
            else:
                yield from self._misfits(name, parts, *known)

    def _misfits(self, name: str, parts: Mapping[str, torch.Tensor], inputs: int, outputs: int) -> Iterator[str]:
        a, b = (parts[part] for part in _FACTORS[:2])
        rank, most = a.shape[0], self._config.max_lora_rank
        if a.shape != (rank, inputs) or b.shape != (outputs, rank):
            shapes = f"A {list(a.shape)} and B {list(b.shape)}"
            yield f"{name}: {shapes} do not fit {inputs} inputs and {outputs} outputs"
        elif rank > most:
            yield f"{name}: its rank is {rank}, the engine's max_lora_rank is {most}"


def _manager(vllm_worker: Any) -> Any:
    return vllm_worker.model_runner.lora_manager._adapter_manager


def _named(manager: Any, layer: str) -> str:
    """vLLM's name of a layer of a file: parts of a fused layer keep theirs."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    renaming: Any = getattr(manager.model, "hf_to_vllm_mapper", None)
    for without_fusing in ("get_rename_mapper", "get_unstacked_mapper"):  # the latter in vLLM 0.26
        if hasattr(renaming, without_fusing):
            renaming = getattr(renaming, without_fusing)()
            break
    name: str = parse_fine_tuned_lora_name(f"{layer}.{_FACTORS[0]}", renaming)[0]
    return name


def _opaque(model: torch.nn.Module) -> Iterator[Any]:
    from vllm.lora.layers import BaseLayerWithLoRA

    for module in model.modules():
        if isinstance(module, BaseLayerWithLoRA) and not hasattr(module, "load_weights"):
            yield module


def _load_below(layer: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
    from vllm.model_executor.models.utils import AutoWeightsLoader

    # Fused layers have a loader of their own, which knows the parts.
    below = layer.base_layer
    load = below.load_weights if hasattr(below, "load_weights") else AutoWeightsLoader(below).load_weights
    loaded: Iterable[str] = load(weights)
    return loaded


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
