"""Engines by the name of `--engine_type`."""

from pathlib import Path

import torch

from integrations.ppo.arguments import Arguments
from integrations.ppo.engines.base import InferenceEngine
from integrations.ppo.engines.hf import HFInferenceEngine


def start_engine(args: Arguments, folder: Path, device: torch.device) -> InferenceEngine:
    """Start the engine of this rank on the checkpoint in `folder`. Every rank calls it."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    return HFInferenceEngine(folder, dtype, device)
