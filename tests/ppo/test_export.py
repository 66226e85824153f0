"""The trained actor and its average, as transformers reads them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.ppo.rank_steps import averaged
from wsync.testing.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["--fsdp", pytest.param("--zero_stage 3", marks=pytest.mark.matrix)])
def test_average_and_checkpoints(tmp_path: Path, sharding: str) -> None:
    """R73: a moving average was seen with DeepSpeed only."""
    options = f"{sharding} --engine_type hf --steps 1 --ema_decay 0.5 --save_path {tmp_path}"
    for facts in run_ranks(averaged, 2, options, timeout_s=200):
        assert facts == {"equal": True, "differs": True, "back": True}
    actor, average = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path, tmp_path / "ema"))
    assert not torch.equal(actor.lm_head.weight, average.lm_head.weight)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("a", add_special_tokens=False).input_ids == [100]
