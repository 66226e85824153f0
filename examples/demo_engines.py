"""The engines of the demo, each in a process of its own, behind the four things that the demo asks of one."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

Tensors = Mapping[str, torch.Tensor]


class DemoEngine(Protocol):
    """What the demo needs of an engine."""

    handle: object
    """What is passed to `wsync.sync`."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy tokens after each prompt."""
        ...

    def tensors(self, expected: Tensors) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Each resident tensor, read back from the engine, beside what it should be: (name, resident, expected)."""
        ...

    def close(self) -> None:
        """End the engine's processes."""
        ...


def start_engine(name: str, folder: Path) -> DemoEngine:
    """Start engine `name` on the checkpoint in `folder`."""
    return HFDemoEngine(folder) if name == "hf" else VLLMDemoEngine(folder)


class HFDemoEngine:
    """transformers in a worker process of wsync's own."""

    def __init__(self, folder: Path) -> None:
        from wsync.adapters.engines.hf import HFEngine

        self.handle = HFEngine.launch(folder, dtype=torch.float32)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return self.handle.generate(prompts, max_new_tokens=new_tokens)

    def tensors(self, expected: Tensors) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, tensor in expected.items():
            yield name, self.handle.read(name)[0], tensor

    def close(self) -> None:
        self.handle.shutdown()


class VLLMDemoEngine:
    """Real vLLM, with its engine core in another process."""

    def __init__(self, folder: Path) -> None:
        import vllm

        with without_torchrun():
            self.handle = vllm.LLM(
                str(folder),
                dtype="float32",
                enforce_eager=True,
                max_model_len=128,
                kv_cache_memory_bytes=64 << 20,
                skip_tokenizer_init=True,
                worker_extension_cls="wsync.adapters.engines.vllm_worker.WorkerExtension",
            )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        import vllm

        greedy = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        outputs = self.handle.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def tensors(self, expected: Tensors) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from wsync.adapters.engines.vllm import VLLMEngine

        engine = VLLMEngine(self.handle)
        for name, tensor in fused(expected).items():
            yield name, engine.read(name)[0], tensor

    def close(self) -> None:
        del self.handle


def fused(state: Tensors) -> dict[str, torch.Tensor]:
    """A Llama state dict as vLLM keeps it on one worker: q, k and v in one tensor, gate and up in another."""
    parts: dict[str, list[torch.Tensor]] = {}
    groups = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
    for name, tensor in state.items():
        *path, leaf, kind = name.split(".")
        parts.setdefault(".".join([*path, groups.get(leaf, leaf), kind]), []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


@contextmanager
def without_torchrun() -> Iterator[None]:
    """Hide torchrun's variables while the engine starts: its processes are not ranks of the trainer."""
    names = [n for n in os.environ if n.startswith(("TORCHELASTIC_", "MASTER_")) or n in _RANK_VARIABLES]
    kept: dict[str, Any] = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(kept)


_RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "GROUP_WORLD_SIZE"}
