"""What tests do inside of an engine's workers: a look at the live weights."""

import hashlib
from typing import Any

import torch

Seen = dict[str, list[object]]


def snapshot(model: Any, *, buffers: bool = True) -> Seen:
    """Name -> [digest of the bytes, address] of every parameter, and of every buffer too if they are asked for."""
    tensors = [*model.named_parameters(remove_duplicate=False), *(model.named_buffers() if buffers else ())]
    return {name: [sha(tensor.detach()), tensor.data_ptr()] for name, tensor in tensors}


def sha(tensor: torch.Tensor) -> str:
    """Digest of its bytes."""
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
