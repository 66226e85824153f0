"""What a prediction is asked for: a model, its trainer, its engine, and the GPUs that both share."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from wsync.config import MIB, PathMode, SyncConfig
from wsync.errors import ConfigError
from wsync.planner.model import Model

Trainer = Literal["plain", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"]
Optimizer = Literal["adamw", "sgd"]
Transport = Literal["inproc", "cuda_ipc"]

OFFLOADS = ("actor", "optimizer")
"""What can leave the GPU for host memory."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

CONTEXT_BYTES = 614 * MIB
"""0.6 GiB: a CUDA context with the code of the kernels that were loaded, which PyTorch's allocator does not count. An
assumption: about 0.3 GiB are reported for a context alone since kernels are loaded when first called (pytorch issue
107667), and libraries of kernels and workspaces come on top. It differs by driver, GPU and libraries. To measure it,
see what the free memory in `torch.cuda.mem_get_info()` loses as a new process makes its first matrix product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Co-located training: every GPU has one rank of the trainer and one worker of the engine.

    Raises `ConfigError` if its parts do not fit together.
    """

    model: Model

    gpus: int
    """Of the whole job."""

    gpu_bytes: int
    """Memory of one GPU."""

    gpus_per_node: int = 8
    """At most; for host memory."""

    trainer: Trainer = "fsdp2"
    """How the actor is sharded. "plain" is whole on every rank, "zero1" to "zero3" are DeepSpeed's."""

    ranks: int
    """Over which one copy of the actor is sharded. More GPUs than that hold further copies."""

    lora_rank: int = 0
    """Of LoRA on every linear layer of attention and MLPs. 0: all parameters train, else only the factors do."""

    actor_dtype: torch.dtype = torch.float32
    """Of the actor's parameters and gradients. LoRA factors are float32, as PEFT makes them."""

    compute_dtype: torch.dtype = torch.bfloat16
    """Of activations, and of the layers that FSDP gathers."""

    optimizer: Optimizer = "adamw"
    """Two states for each trained parameter, or none for "sgd", which is without momentum."""

    state_dtype: torch.dtype = torch.float32
    """Of these states. PyTorch's own optimizers make them in the dtype of the parameters."""

    master: bool | None = None
    """Whether the optimizer keeps a float32 copy of what it trains. None: DeepSpeed does, others do not."""

    reduce_bucket: int = 500_000_000
    """DeepSpeed's `reduce_bucket_size`, in elements."""

    engine_dtype: torch.dtype = torch.bfloat16
    """Of the engine's weights and KV cache, and on the wire."""

    tp: int = 1
    """Workers over which one replica of the engine is split: tensor parallelism."""

    kv_bytes: int | None = None
    """KV cache of one worker, in bytes. Give this or `kv_fraction`."""

    kv_fraction: float | None = None
    """As vLLM's `gpu_memory_utilization`: the share of a GPU that the engine's weights, its activations and the KV
    cache take together. The cache gets what the others leave."""

    engine_activations: int | None = None
    """Most bytes that a step of one worker takes beside weights and cache. None: see `wsync.planner.activations`."""

    cuda_graph_bytes: int = 0
    """What one worker's CUDA graphs take for good. Engines log it when they capture them; 0 if they are off."""

    sleep_level: Literal[1, 2] = 2
    """1: an engine's weights are kept in host memory while it sleeps; 2: they are dropped."""

    transport: Transport = "cuda_ipc"
    """"inproc": the engine's worker is a part of the trainer's process; "cuda_ipc": it has a process of its own."""

    bucket_bytes: int = SyncConfig().bucket_bytes
    """See `wsync.SyncConfig`."""

    num_slots: int = SyncConfig().num_slots
    """See `wsync.SyncConfig`."""

    path: PathMode = SyncConfig().path
    """See `wsync.SyncConfig`. "auto" is "buckets" if an actor in shards is on several nodes."""

    staging_bytes: int = SyncConfig().staging_bytes
    """See `wsync.SyncConfig`."""

    offload: Set[str] = frozenset(OFFLOADS)
    """Those of `OFFLOADS` that are in host memory while nobody needs them."""

    activations: int | None = None
    """Of a training step on one rank, in bytes. None: see `wsync.planner.activations`."""

    micro_batch: int = 1
    """Sequences that go through the actor at once."""

    sequence: int = 4096
    """Tokens of each of them."""

    checkpointing: bool = True
    """Whether only the input of each layer is kept for the backward pass, and the rest computed again."""

    context_bytes: int = CONTEXT_BYTES
    """Of each process on a GPU."""

    def __post_init__(self) -> None:
        _choice("trainer", self.trainer, get_args(Trainer))
        _choice("optimizer", self.optimizer, get_args(Optimizer))
        _choice("transport", self.transport, get_args(Transport))
        _choice("sleep_level", self.sleep_level, (1, 2))
        for name in ("actor_dtype", "compute_dtype", "state_dtype", "engine_dtype"):
            _choice(name, getattr(self, name), tuple(DTYPES.values()))
        for one in self.offload:
            _choice("offload", one, OFFLOADS)
        positive = ("gpus", "gpu_bytes", "gpus_per_node", "ranks", "tp", "reduce_bucket", "micro_batch", "sequence")
        _at_least(1, **{name: getattr(self, name) for name in positive})
        _at_least(0, lora_rank=self.lora_rank, cuda_graph_bytes=self.cuda_graph_bytes, context_bytes=self.context_bytes)
        _at_least(0, activations=self.activations, engine_activations=self.engine_activations)
        SyncConfig(
            bucket_bytes=self.bucket_bytes, num_slots=self.num_slots, path=self.path, staging_bytes=self.staging_bytes
        )
        if self.path == "pull" and self.gpus > self.gpus_per_node:
            raise ConfigError(f"path is 'pull', which is within one node; gpus is {self.gpus}, more than one has")
        _divides("ranks", self.ranks, "gpus", self.gpus)
        _divides("tp", self.tp, "gpus", self.gpus)
        _check_cache(self.kv_bytes, self.kv_fraction)
        check_tp(self.model, self.tp)

    @property
    def sharded(self) -> bool:
        """Whether a rank holds less than the whole actor."""
        return self.ranks > 1 and self.trainer in ("fsdp1", "fsdp2", "zero3")

    @property
    def pulls(self) -> bool:
        """Whether workers read the ranks' shards."""
        return self.path == "pull" or (self.path == "auto" and self.sharded and self.gpus <= self.gpus_per_node)

    @property
    def reads_in_place(self) -> bool:
        """Whether workers read weights where the trainer has them, but for what LoRA merges."""
        whole = not self.sharded and (not self.lora_rank or self.gpus <= self.gpus_per_node)
        return self.pulls or (self.path == "auto" and whole)

    @property
    def has_master(self) -> bool:
        """Whether the optimizer keeps a float32 copy of what it trains."""
        return self.trainer.startswith("zero") if self.master is None else self.master

    @property
    def node_gpus(self) -> int:
        """GPUs of the fullest node."""
        return min(self.gpus, self.gpus_per_node)


def check_tp(model: Model, tp: int) -> None:
    """Raise `ConfigError` unless engines can split `model` over `tp` workers."""
    _divides("tp", tp, "attention heads of the model", model.heads)
    if model.kv_heads % tp and tp % model.kv_heads:
        raise ConfigError(f"tp is {tp} and the model has {model.kv_heads} KV heads: one must divide the other")
    for name, shape in model.shapes.items():
        if name.endswith("up_proj.weight"):
            _divides("tp", tp, f"outputs of {name}", shape[0])


def _choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; choose from {', '.join(map(str, allowed))}")


def _at_least(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")


def _divides(name: str, part: int, of: str, whole: int) -> None:
    if whole % part:
        raise ConfigError(f"{name} is {part}, which does not divide {whole}, the {of}")


def _check_cache(kv_bytes: int | None, kv_fraction: float | None) -> None:
    if (kv_bytes is None) == (kv_fraction is None):
        raise ConfigError("give the size of the KV cache once: kv_bytes or kv_fraction")
    _at_least(1, kv_bytes=kv_bytes)
    if kv_fraction is not None and not 0 < kv_fraction <= 1:
        raise ConfigError(f"kv_fraction is {kv_fraction}; it must be above 0 and at most 1")
