"""What a user may set. Nothing here reads the environment."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from wsync.errors import ConfigError

MIB = 1 << 20
PauseMode = Literal["abort", "wait", "keep"]
PathMode = Literal["auto", "buckets", "pull"]
VerifyMode = Literal["digest"]
LoRAMode = Literal["merged", "adapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncConfig:
    """Settings of a session. Every trainer rank must pass the same ones."""

    bucket_bytes: int = 256 * MIB
    """Capacity of one slot, in bytes. Larger buckets cost memory, smaller ones control messages."""

    num_slots: int = 2
    """Slots in the ring: one is filled while the others travel or are loaded."""

    senders: int = 1
    """Trainer ranks that send buckets in turn, each with slots of its own, to an engine that one rank owns: that one
    and those after it. For transports between hosts, `gloo` and `nccl`, where the parts of a bucket would else all go
    through one rank."""

    dtype: torch.dtype | None = None
    """Wire dtype of every floating-point tensor. None: what the engine declares, tensor by tensor."""

    transport: object = "auto"
    """"auto", the name of a transport, or an object that meets `wsync.Transport`."""

    path: PathMode = "auto"
    """"pull": workers read what they need where trainer ranks have it, straight from shard to parameter; what cannot be
    read so travels in buckets in the same sync. For processes of one host. "buckets": everything travels. "auto": on
    GPUs whole tensors are read in place and shards pulled where that can be, else everything travels."""

    staging_bytes: int = 2 << 30
    """Most memory that a trainer rank takes to cast weights before workers pull them over a link between GPUs, so that
    the narrower dtype crosses. What does not fit crosses as it is. 0: everything does."""

    timeout_s: float = 120.0
    """Longest wait, in seconds, for any single peer, rank or engine call before an error is raised."""

    pause: PauseMode = "wait"
    """What happens to requests in flight: "abort" ends them, "wait" lets them finish, "keep" freezes them. With "keep"
    they go on after the sync: tokens so far stay, and their caches are computed anew with the new weights.

    A `vllm.LLM` works on requests only while one of its methods runs. So nothing is in flight during a sync but what
    `enqueue` added, and with "wait" that is an `EngineStateError` which says so, raised before anything moves: call
    `llm.wait_for_completion()` first, it returns the outputs. With "abort" such requests end without an output, with
    "keep" they go on under the new weights at the next `wait_for_completion`. The embedded engine (hf) has no "keep".
    """

    verify: VerifyMode | None = None
    """"digest" compares a 64-bit digest of every tensor on both sides before the version is published."""

    lora: LoRAMode = "merged"
    """What is sent of a module with LoRA adapters: "merged" weights, which every engine takes, or the active "adapter"
    alone, for engines that have the same base weights and take such an adapter."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 4096:
            raise ConfigError(f"bucket_bytes is {self.bucket_bytes}; it must be at least 4096 bytes")
        if self.num_slots < 1:
            raise ConfigError(f"num_slots is {self.num_slots}; at least one slot is needed")
        if self.staging_bytes < 0:
            raise ConfigError(f"staging_bytes is {self.staging_bytes}; it must be 0 or more bytes")
        if self.senders < 1:
            raise ConfigError(f"senders is {self.senders}; at least one rank sends")
        if self.senders > 1 and self.path == "pull":
            raise ConfigError("senders take turns with buckets; with path='pull' workers read: leave one out")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s is {self.timeout_s}; it must be a positive number of seconds")
        if self.path not in get_args(PathMode):
            raise ConfigError(f"path is {self.path!r}; choose one of {', '.join(get_args(PathMode))}")
        if self.path == "pull" and self.verify is not None:
            raise ConfigError("verify compares what arrives in buckets; with path='pull' nothing does: leave one out")
        if self.pause not in get_args(PauseMode):
            raise ConfigError(f"pause is {self.pause!r}; choose one of {', '.join(get_args(PauseMode))}")
        if self.verify not in (None, *get_args(VerifyMode)):
            raise ConfigError(f"verify is {self.verify!r}; choose None or one of {', '.join(get_args(VerifyMode))}")
        if self.lora not in get_args(LoRAMode):
            raise ConfigError(f"lora is {self.lora!r}; choose one of {', '.join(get_args(LoRAMode))}")
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise ConfigError(f"dtype is {self.dtype!r}; pass a dtype of torch, such as torch.bfloat16")
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigError(f"dtype is {self.dtype}; a floating-point dtype is needed")
