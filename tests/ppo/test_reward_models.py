"""Reward models: what they say is what transformers says, and one of them is on the device at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.ppo.toy import config
from tests.ppo.rank_steps import JUDGED, judged, text_rollout
from wsync.testing.ranks import run_ranks


def reward_model(folder: Path, seed: int, pad_token_id: int | None) -> Any:
    """A random one, in `folder` with its tokenizer, which pads with 0."""
    from transformers import AutoModelForSequenceClassification, ByT5Tokenizer

    settings = config(64)
    settings.num_labels, settings.pad_token_id = 1, pad_token_id
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(settings).eval()
    model.save_pretrained(folder)
    ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    return model


@pytest.mark.slow
def test_two_reward_models(tmp_path: Path) -> None:
    """R56: a trainer was seen to bring all of them first.

    One pads with another token than its tokenizer does, one knows no padding, and so judges one by one.
    """
    from transformers import ByT5Tokenizer

    folders = [tmp_path / "one", tmp_path / "two"]
    models = [reward_model(folder, seed, (5, None)[seed]) for seed, folder in enumerate(folders)]
    wanted = []
    for one in map(text_rollout, JUDGED[0]):
        ids = torch.tensor([ByT5Tokenizer(extra_ids=0)(one.prompt + one.response).input_ids])
        with torch.no_grad():
            wanted.append(sum(float(model(input_ids=ids).logits) for model in models))
    facts = run_ranks(judged, 2, [str(folder) for folder in folders], timeout_s=120)
    assert facts[0]["said"] == pytest.approx(wanted, abs=1e-5)
    assert facts[1]["said"] == []
    for one in facts:
        assert one["seen"] == [["actor", "critic", f"reward {number}"] for number in (0, 1, 1, 1)]
        assert one["afterwards"] == ["actor", "critic"]
