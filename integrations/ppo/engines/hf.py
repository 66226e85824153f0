"""A transformers model in this process, one on each rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from integrations.ppo.engines.base import Completion, SamplingParams
from integrations.ppo.experience import padded
from integrations.ppo.log_probs import Scoring, token_log_probs
from integrations.ppo.randomness import kept_random_state
from wsync.adapters.engines.hf import HFEngine


class HFInferenceEngine:
    """See `InferenceEngine`. A batch is sampled together: the first seed is that of all.

    A checkpoint's own ways to sample (nucleus, penalties) are left out, as vLLM and SGLang do when they are told how:
    what answers is the policy that is trained.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.handle: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.handle.generation_config = GenerationConfig()
        self._engine = HFEngine(self.handle)
        self._device = device

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        """See `InferenceEngine`."""
        if not prompts:
            return []
        sampling = {"do_sample": True, "temperature": params.temperature, "top_k": 0} if params.temperature else {}
        with kept_random_state():
            torch.manual_seed(seeds[0])
            answers = self._engine.generate(
                prompts, max_new_tokens=params.max_new_tokens, eos_token_id=params.stop_token_id, **sampling
            )
        log_probs = self._log_probs(prompts, answers, params.temperature or 1.0)
        return [
            Completion(prompt_token_ids=list(prompt), output_token_ids=answer, log_probs=said)
            for prompt, answer, said in zip(prompts, answers, log_probs, strict=True)
        ]

    @torch.no_grad()
    def _log_probs(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], temperature: float
    ) -> list[list[float]]:
        """transformers' own scores are those of a batch that is padded on the left, which rounds in another way."""
        sequences, attention_mask, action_mask = padded(prompts, answers)
        said, _ = token_log_probs(
            self.handle, sequences.to(self._device), attention_mask.to(self._device), Scoring(temperature=temperature)
        )
        return [row[chosen].tolist() for row, chosen in zip(said.cpu(), action_mask, strict=True)]

    def close(self) -> None:
        """See `InferenceEngine`."""
