"""The engines of the demo, each in a process of its own, behind the four things that the demo asks of one."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

Tensors = Mapping[str, torch.Tensor]

_STUBS = Path(__file__).parents[1] / "tests" / "stubs"

_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_")


class DemoEngine(Protocol):
    """What the demo needs of an engine."""

    @property
    def handle(self) -> object:
        """What is passed to `wsync.sync`."""
        ...

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
    kinds: dict[str, Callable[[Path], DemoEngine]] = {
        "hf": HFDemoEngine,
        "vllm": VLLMDemoEngine,
        "sglang": SGLangDemoEngine,
    }
    return kinds[name](folder)


class HFDemoEngine:
    """transformers in a worker process of wsync's own."""

    def __init__(self, folder: Path) -> None:
        from wsync.adapters.engines.hf import HFEngine

        self._engine = HFEngine.launch(folder, dtype=torch.float32)

    @property
    def handle(self) -> object:
        return self._engine

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return self._engine.generate(prompts, max_new_tokens=new_tokens)

    def tensors(self, expected: Tensors) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, tensor in expected.items():
            yield name, self._engine.read(name)[0], tensor

    def close(self) -> None:
        self._engine.shutdown()


class VLLMDemoEngine:
    """Real vLLM, with its engine core in another process."""

    def __init__(self, folder: Path) -> None:
        import vllm

        with without_torchrun():
            self._llm = vllm.LLM(
                str(folder),
                dtype="float32",
                distributed_executor_backend="uni",
                enforce_eager=True,
                max_model_len=128,
                kv_cache_memory_bytes=64 << 20,
                skip_tokenizer_init=True,
                worker_extension_cls="examples.vllm_plain_weights.PlainWeights",
            )

    @property
    def handle(self) -> object:
        return self._llm

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        import vllm

        greedy = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def tensors(self, expected: Tensors) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from wsync.adapters.engines.vllm import VLLMEngine

        engine = VLLMEngine(self._llm)
        for name, tensor in fused(expected).items():
            yield name, engine.read(name)[0], tensor

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class SGLangDemoEngine:
    """Real SGLang, with its scheduler in another process."""

    def __init__(self, folder: Path) -> None:
        with without_torchrun(), sglang_on_cpu():
            import sglang

            self._engine = sglang.Engine(
                model_path=str(folder),
                dtype="float32",
                device="cpu",
                attention_backend="torch_native",
                sampling_backend="pytorch",
                disable_cuda_graph=True,
                disable_overlap_schedule=True,
                mem_fraction_static=0.1,
                max_total_tokens=4096,
                context_length=128,
                skip_tokenizer_init=True,
                skip_server_warmup=True,
            )

    @property
    def handle(self) -> object:
        return self._engine

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        greedy = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        return [answer["output_ids"] for answer in self._engine.generate(input_ids=prompts, sampling_params=greedy)]

    def tensors(self, expected: Tensors) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        from wsync.adapters.engines.sglang import SGLangEngine

        engine = SGLangEngine(self._engine)
        for name, tensor in fused(expected).items():
            yield name, engine.read(name)[0], tensor

    def close(self) -> None:
        self._engine.shutdown()


def fused(state: Tensors) -> dict[str, torch.Tensor]:
    """A Llama state dict as vLLM and SGLang keep it on one worker: q, k and v in one tensor, gate and up in another."""
    parts: dict[str, list[torch.Tensor]] = {}
    groups = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
    groups |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
    for name, tensor in state.items():
        *path, leaf, kind = name.split(".")
        parts.setdefault(".".join([*path, groups.get(leaf, leaf), kind]), []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


@contextmanager
def without_torchrun() -> Iterator[None]:
    """Hide torchrun's variables while the engine starts: its processes are not ranks of the trainer."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(_TORCHRUN_PREFIXES)}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextmanager
def sglang_on_cpu() -> Iterator[None]:
    """SGLang's CPU path, with stubs in place of packages that exist for CUDA only. Its processes inherit both."""
    settings = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0", "PYTHONWARNINGS": "ignore"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    sys.path.insert(0, str(_STUBS))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.path.remove(str(_STUBS))
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text
