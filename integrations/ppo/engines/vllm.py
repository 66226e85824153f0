"""vLLM in this process: on every rank an engine, or with tensor parallelism a part of one (`external_launcher`)."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from integrations.ppo.arguments import Arguments
from integrations.ppo.engines.base import Completion, SamplingParams
from integrations.ppo.errors import ConflictError
from integrations.ppo.randomness import kept_random_state

CPU_CACHE_BYTES = 64 << 20
"""On a device it is `--engine_mem_util`; vLLM's CPU build would take its share of all host memory."""


class VLLMInferenceEngine:
    """See `InferenceEngine`."""

    def __init__(self, args: Arguments, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `ConflictError` if the environment asks for an engine in another process.

        vLLM ends the default process group when it is collected: it lives as long as the trainer.
        """
        if os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
            raise ConflictError("--engine_type vllm runs vLLM in each rank: unset VLLM_ENABLE_V1_MULTIPROCESSING")
        from vllm import LLM

        place: dict[str, Any] = {"kv_cache_memory_bytes": CPU_CACHE_BYTES, "enforce_eager": True}
        if device.type == "cuda":
            place = {"gpu_memory_utilization": args.engine_mem_util, "enable_sleep_mode": True}
        with kept_random_state():
            self.handle: Any = LLM(
                model=str(folder),
                dtype=str(dtype).removeprefix("torch."),
                skip_tokenizer_init=True,
                max_model_len=args.prompt_max_len + args.generate_max_len,
                tensor_parallel_size=args.engine_tp_size,
                distributed_executor_backend="external_launcher",
                logprobs_mode="processed_logprobs",
                seed=args.seed,
                **{**place, **args.further_engine_args},
            )

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        """See `InferenceEngine`."""
        from vllm import SamplingParams as Sampling

        stop = [] if params.stop_token_id is None else [params.stop_token_id]
        sampling = [
            Sampling(
                max_tokens=params.max_new_tokens,
                temperature=params.temperature,
                seed=seed,
                stop_token_ids=stop,
                logprobs=0,
                detokenize=False,
            )
            for seed in seeds
        ]
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with kept_random_state():
            answers = self.handle.generate(asked, sampling, use_tqdm=False)
        return [_completion(prompt, answer.outputs[0]) for prompt, answer in zip(prompts, answers, strict=True)]

    def close(self) -> None:
        """See `InferenceEngine`."""


def _completion(prompt: Sequence[int], output: Any) -> Completion:
    ids = list(output.token_ids)
    said = [said[token].logprob for token, said in zip(ids, output.logprobs, strict=True)]
    return Completion(prompt_token_ids=list(prompt), output_token_ids=ids, log_probs=said)
