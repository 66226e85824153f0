"""What answers is the policy itself, whatever its checkpoint says about sampling."""

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from integrations.ppo import models
from integrations.ppo.arguments import Arguments
from integrations.ppo.engines.base import Completion, SamplingParams
from integrations.ppo.engines.hf import HFInferenceEngine


def answers(folder: Path, temperature: float, settings: GenerationConfig | None = None) -> list[Completion]:
    policy = models.policy(Arguments())
    if settings is not None:
        policy.generation_config = settings
    policy.save_pretrained(folder)
    engine = HFInferenceEngine(folder, torch.float32, torch.device("cpu"))
    params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=3, stop_token_id=None)
    return engine.generate([[40, 50], [60]], [3, 4], params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_checkpoints_ways_to_sample_are_left_out(tmp_path: Path, temperature: float) -> None:
    own = GenerationConfig(do_sample=True, top_k=1, top_p=0.01, temperature=0.1, repetition_penalty=5.0)
    plain = answers(tmp_path / "plain", temperature)
    assert answers(tmp_path / "own", temperature, own) == plain
    assert [len(one.output_token_ids) for one in plain] == [12, 12]
