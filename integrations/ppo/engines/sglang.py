"""SGLang in processes of its own: the first of the ranks that share an engine owns it, and passes its answers on."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from integrations.ppo.arguments import Arguments
from integrations.ppo.engines.base import Completion, SamplingParams
from integrations.ppo.groups import EngineGroup

LAUNCHER = ("TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_")
"""Beginnings of the names of torchrun's variables."""

CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 4096,
}


class SGLangInferenceEngine:
    """See `InferenceEngine`, but for seeds: SGLang samples by a random state of its own, which `--seed` starts.

    It takes a seed a request with batch-invariant kernels only, which are slower, and which a CPU has not.
    """

    def __init__(
        self, args: Arguments, folder: Path, dtype: torch.dtype, device: torch.device, group: EngineGroup
    ) -> None:
        self._group = group
        self.handle: Any = None
        if group.place:
            return
        place: dict[str, Any] = CPU
        if device.type == "cuda":
            place = {
                "base_gpu_id": device.index,
                "mem_fraction_static": args.engine_mem_util,
                "enable_memory_saver": True,
                "enable_weights_cpu_backup": args.engine_sleep_level == 1,
            }
        with outside_torchrun():
            import sglang

            self.handle = sglang.Engine(
                model_path=str(folder),
                dtype=str(dtype).removeprefix("torch."),
                tp_size=args.engine_tp_size,
                skip_tokenizer_init=True,
                skip_server_warmup=True,
                random_seed=args.seed,
                **{**place, **args.further_engine_args},
            )

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        """See `InferenceEngine`."""
        mine = self._ask(prompts, params) if self.handle is not None else None
        return self._group.from_first(mine)

    def _ask(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
        stop = [] if params.stop_token_id is None else [params.stop_token_id]
        shared = {"max_new_tokens": params.max_new_tokens, "temperature": params.temperature, "stop_token_ids": stop}
        answers = self.handle.generate(
            input_ids=[list(prompt) for prompt in prompts], sampling_params=shared, return_logprob=True
        )
        return [_completion(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def close(self) -> None:
        """See `InferenceEngine`."""
        if self.handle is not None:
            self.handle.shutdown()


def _completion(prompt: Sequence[int], answer: Any) -> Completion:
    said = [log_prob for log_prob, *_ in answer["meta_info"]["output_token_logprobs"]]
    return Completion(prompt_token_ids=list(prompt), output_token_ids=list(answer["output_ids"]), log_probs=said)


@contextmanager
def outside_torchrun() -> Iterator[None]:
    """Hide torchrun's variables while an engine starts: its processes are not ranks of the trainer."""
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(LAUNCHER)}
    try:
        yield
    finally:
        os.environ.update(kept)
