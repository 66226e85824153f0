"""What the tests add to the worker extension: a look at the live weights, and vLLM's own load to compare with."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.engines import inside
from tests.engines.inside import Seen, sha
from tests.engines.pull_trap import Trap, set_trap
from wsync.adapters.engines.vllm_worker import WorkerExtension


def snapshot(vllm_worker: Any, *, buffers: bool = True) -> Seen:
    """See `inside.snapshot`."""
    return inside.snapshot(vllm_worker.get_model(), buffers=buffers)


def load(vllm_worker: Any, folder: str) -> None:
    """A fresh `model.load_weights` of the checkpoint in `folder`."""
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(vllm_worker.vllm_config), torch.no_grad():
        vllm_worker.get_model().load_weights(load_file(Path(folder) / "model.safetensors").items())


class LookingExtension(WorkerExtension):
    """The extension under test, and the looks."""

    def wsync_test_snapshot(self, buffers: bool = True) -> bytes:
        """`snapshot` as JSON."""
        return json.dumps(snapshot(self, buffers=buffers)).encode()

    def wsync_test_trap(self, message: dict[str, Any]) -> None:
        """`set_trap`."""
        this: Any = self
        set_trap(Trap(**message), this.rank)

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
            name: [sha(stack[slot]) for stack in (*module.lora_a_stacked, *module.lora_b_stacked)]
            for name, module in manager.modules.items()
            if isinstance(module.lora_a_stacked, tuple)  # of a linear layer
        }
