"""Models from checkpoints and of the toy, and options that do not fit them."""

from pathlib import Path
from typing import Any

import pytest
import torch

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


def backbone(model: Any) -> list[torch.Tensor]:
    return list(model.model.parameters())


def test_policy_and_critic_start_from_their_checkpoints(tmp_path: Path) -> None:
    """R13: the reference is a second `policy`. A critic's head, which no checkpoint has, belongs to the seed."""
    folders = [str(tmp_path / name) for name in ("one", "other")]
    saved = [models.policy(Arguments(seed=seed)) for seed in (5, 6)]
    for folder, model in zip(folders, saved, strict=True):
        model.save_pretrained(folder)
    one, both = Arguments(pretrain=folders[0]), Arguments(pretrain=folders[0], critic_pretrain=folders[1])
    critics = [models.critic(args) for args in (one, both)]
    pairs = [(models.policy(one), saved[0]), (models.policy(both), saved[0]), *zip(critics, saved, strict=True)]
    for found, wanted in pairs:
        assert all(map(torch.equal, backbone(found), backbone(wanted)))
    assert torch.equal(models.policy(one).lm_head.weight, saved[0].lm_head.weight)
    heads = [one.score.weight for one in (*critics, models.critic(one))]
    assert torch.equal(heads[0], heads[1])
    assert torch.equal(heads[0], heads[2])
    assert not any(module.p for module in critics[0].modules() if isinstance(module, torch.nn.Dropout))


def test_heads_that_do_not_go_into_slices() -> None:
    args = Arguments(sp_size=3)
    with pytest.raises(ConflictError, match="--sp_size 3 is no divisor of the model's 2 attention heads"):
        models.parallel(args, models.policy(args))
