"""Real engines that start with random weights, and what they answer."""

from pathlib import Path
from typing import Any

import torch

from wsync.bench.gpu.far import Far

NEW_TOKENS = 12
_CACHE_BYTES = 1 << 30


def prompts() -> list[list[int]]:
    """Three prompts of nine tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, 1000, (3, 9), generator=generator).tolist()


def start_vllm(
    folder: Path,
    dtype: str,
    *,
    eager: bool = True,
    sleep: bool = False,
    dummy: bool = True,
    workers: int = 1,
    adapters_of_rank: int = 0,
    cache_bytes: int = _CACHE_BYTES,
    extension: str = "wsync.bench.gpu.loops.LoopExtension",
    transfer: str = "",
) -> Any:
    """`vllm.LLM`. Whether its core is in this process is up to `VLLM_ENABLE_V1_MULTIPROCESSING`.

    Args:
        folder: a checkpoint folder.
        dummy: start with random weights; the folder needs none.
        workers: how many share a model, each on a device of its own.
        adapters_of_rank: highest rank of LoRA adapters that it takes; 0: none.
        cache_bytes: of the KV cache.
        extension: of its workers; one of wsync's is a base of it.
        transfer: vLLM's own backend for new weights; "": none.
    """
    from vllm import LLM

    lora = {"enable_lora": True, "max_lora_rank": adapters_of_rank} if adapters_of_rank else {}
    # vLLM's own way to reduce maps memory that multicast needs.
    several = {"tensor_parallel_size": workers, "disable_custom_all_reduce": True} if workers > 1 else {}
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy" if dummy else "auto",
        dtype=dtype,
        enforce_eager=eager,
        enable_sleep_mode=sleep,
        attention_backend="TRITON_ATTN",
        kv_cache_memory_bytes=cache_bytes,
        max_model_len=512,
        max_num_seqs=8,
        worker_extension_cls=extension,
        **lora,
        **several,
        **({"weight_transfer_config": {"backend": transfer}} if transfer else {}),
    )


def start_sglang(folder: Path, dtype: str, *, sleep: bool = False) -> Any:
    """`sglang.Engine`, with the hook for updates that wsync documents for it, and that of `workers`."""
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
        custom_weight_loader=["wsync.adapters.engines.sglang_worker.load", "wsync.bench.gpu.workers.tell"],
    )


def is_sglang(engine: Any) -> bool:
    """Whether `start_sglang` made it. Imports nothing."""
    return type(engine).__module__.partition(".")[0] == "sglang"


def answers_of(engine: Any, request: Any = None) -> list[list[int]]:
    """Greedy tokens. `request`: vLLM's `LoRARequest` of the adapter to answer with."""
    if isinstance(engine, Far):
        return [list(tokens) for tokens in engine.ask("answers")]
    if is_sglang(engine):
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        return [list(out["output_ids"]) for out in engine.generate(input_ids=prompts(), sampling_params=sampling)]
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    outs = engine.generate(asked, params, use_tqdm=False, lora_request=request)
    return [list(out.outputs[0].token_ids) for out in outs]
