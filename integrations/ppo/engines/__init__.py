"""Engines by the name of `--engine_type`."""

from pathlib import Path

import torch

from integrations.ppo.arguments import Arguments
from integrations.ppo.engines.base import InferenceEngine
from integrations.ppo.errors import ConflictError
from integrations.ppo.groups import EngineGroup


def start_engine(args: Arguments, folder: Path, device: torch.device, group: EngineGroup) -> InferenceEngine:
    """*Collective.* Start the engine of this rank, or its part of one, on the checkpoint in `folder`.

    Raises `ConflictError` for a type that there is not.
    """
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    if args.engine_type == "hf":
        from integrations.ppo.engines.hf import HFInferenceEngine

        return HFInferenceEngine(folder, dtype, device)
    if args.engine_type == "sglang":
        from integrations.ppo.engines.sglang import SGLangInferenceEngine

        return SGLangInferenceEngine(args, folder, dtype, device, group)
    if args.engine_type == "vllm":
        from integrations.ppo.engines.vllm import VLLMInferenceEngine

        return VLLMInferenceEngine(args, folder, dtype, device)
    raise ConflictError(f"there is no engine {args.engine_type!r}; there are vllm, sglang and hf")
