"""Options that do not fit the checkpoint that they are given with."""

from typing import Any

import pytest

from integrations.ppo import models
from integrations.ppo.arguments import Arguments
from integrations.ppo.errors import ConflictError
from integrations.ppo.texts import tokenizer


class OtherTokens:
    """A tokenizer that is not of bytes."""

    input_ids = (7,)

    def __call__(self, text: str, add_special_tokens: bool) -> "OtherTokens":
        return self


def test_the_toy_fits() -> None:
    args = Arguments()
    models.check(args, tokenizer(args), models.policy(args).config)


def test_more_tokens_than_positions() -> None:
    args = Arguments(generate_max_len=16)
    config: Any = models.policy(args).config
    with pytest.raises(ConflictError, match="are 408 tokens; the model has 32 positions"):
        models.check(Arguments(generate_max_len=400), tokenizer(args), config)


def test_the_toys_reward_wants_bytes() -> None:
    args = Arguments(pretrain="some/model")
    with pytest.raises(ConflictError, match="some/model has others: --reward"):
        models.check(args, OtherTokens(), None)
    models.check(Arguments(pretrain="some/model", reward=["a:b"]), OtherTokens(), None)


def test_adapters_are_on_the_output_layer_too() -> None:
    """By default: the runs that show that LoRA learns have them so."""
    args = Arguments(lora_rank=4)
    trained = {name for name, one in models.adapted(args, models.policy(args)).named_parameters() if one.requires_grad}
    assert all("lora_" in name for name in trained)
    assert {"lm_head.lora_A", "lm_head.lora_B"} <= {".".join(name.split(".")[-4:-2]) for name in trained}
