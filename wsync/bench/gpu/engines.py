"""Real engines that start with random weights, and what they answer."""

from pathlib import Path
from typing import Any

import torch

NEW_TOKENS = 12
_CACHE_BYTES = 1 << 30


def prompts() -> list[list[int]]:
    """Three prompts of nine tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, 1000, (3, 9), generator=generator).tolist()


def start_vllm(
    folder: Path, dtype: str, *, eager: bool = True, sleep: bool = False, cache_bytes: int = _CACHE_BYTES
) -> Any:
    """`vllm.LLM`. Whether its core is in this process is up to `VLLM_ENABLE_V1_MULTIPROCESSING`."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=dtype,
        enforce_eager=eager,
        enable_sleep_mode=sleep,
        attention_backend="TRITON_ATTN",
        kv_cache_memory_bytes=cache_bytes,
        max_model_len=512,
        max_num_seqs=8,
        worker_extension_cls="wsync.bench.gpu.loops.LoopExtension",
    )


def start_sglang(folder: Path, dtype: str, *, sleep: bool = False) -> Any:
    """`sglang.Engine`, with the hook for updates that wsync documents for it."""
    from sglang import Engine

    return Engine(
        model_path=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=dtype,
        attention_backend="triton",
        sampling_backend="pytorch",
        disable_cuda_graph=True,
        enable_memory_saver=sleep,
        mem_fraction_static=0.35,
        context_length=512,
        max_running_requests=8,
        custom_weight_loader=["wsync.adapters.engines.sglang_worker.load"],
    )


def answers_of(engine: Any) -> list[list[int]]:
    """Greedy tokens."""
    if type(engine).__module__.partition(".")[0] == "sglang":
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        return [list(out["output_ids"]) for out in engine.generate(input_ids=prompts(), sampling_params=sampling)]
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outs]
