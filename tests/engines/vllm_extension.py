"""What the tests add to the worker extension: a look at the live weights, and vLLM's own load to compare with."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from wsync.adapters.engines.vllm_worker import WorkerExtension


def snapshot(vllm_worker: Any) -> dict[str, list[object]]:
    """Name -> [digest of the bytes, address] of every parameter and buffer."""
    model = vllm_worker.get_model()
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: [_sha(tensor.detach()), tensor.data_ptr()] for name, tensor in tensors}


def load(vllm_worker: Any, folder: str) -> None:
    """A fresh `model.load_weights` of the checkpoint in `folder`."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_worker.vllm_config), torch.no_grad():
        vllm_worker.get_model().load_weights(load_file(Path(folder) / "model.safetensors").items())


def _sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


class LookingExtension(WorkerExtension):
    """The extension under test, and the looks."""

    def wsync_test_snapshot(self) -> bytes:
        """`snapshot` as JSON."""
        return json.dumps(snapshot(self)).encode()

    def wsync_test_load(self, folder: str) -> None:
        """`load`."""
        load(self, folder)


class AdapterExtension(LookingExtension):
    """For adapters."""

    def wsync_test_adapter(self, number: int) -> dict[str, list[str]]:
        """Layer -> digests of what adapter `number` has in the memory that the layer reads."""
        this: Any = self
        manager = this.model_runner.lora_manager._adapter_manager
        slot = manager.lora_index_to_id.index(number)
        return {
            name: [_sha(stack[slot]) for stack in (*module.lora_a_stacked, *module.lora_b_stacked)]
            for name, module in manager.modules.items()
            if isinstance(module.lora_a_stacked, tuple)  # of a linear layer
        }
