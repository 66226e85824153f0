"""Defaults, what a command line becomes, and what does not go together."""

import pytest

from integrations.ppo.arguments import Arguments, parse
from integrations.ppo.errors import ConflictError


def test_defaults_and_round_trip() -> None:
    assert parse([]) == Arguments()
    args = parse(["--fsdp", "--seed", "3", "--reward", "a:b", "c:d", "--temperature", "0.7"])
    assert args == Arguments(fsdp=True, seed=3, reward=["a:b", "c:d"], temperature=0.7)
    assert (args.micro_train_batch_size, args.train_batch_size, args.micro_rollout_batch_size) == (4, 128, 8)
    assert (args.init_kl_coef, args.adam_offload, args.disable_engine_sleep) == (0.01, False, False)


def test_an_unknown_option_is_an_error() -> None:
    with pytest.raises(ValueError, match="--no_such_thing"):
        parse(["--no_such_thing"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--rollout_batch_size 20 --train_batch_size 16", "--train_batch_size"),
        ("--advantage_estimator group_norm", "--n_samples_per_prompt"),
        ("--init_kl_coef -1", "--init_kl_coef"),
        ("--init_kl_coef 0 --use_kl_loss", "reference"),
        ("--init_kl_coef 0 --kl_target 6", "reference"),
        ("--use_kl_loss --kl_target 6", "no effect"),
        ("--save_every 2", "--ckpt_dir"),
        ("--advantage_estimator group_norm --n_samples_per_prompt 2 --critic_pretrain x", "critic"),
        ("--prompt_data x.jsonl", "--reward"),
        ("--ema_decay 0.9", "--save_path"),
        ("--ema_decay 1 --save_path x", "below 1"),
        ("--engine_type hf --engine_tp_size 2", "--engine_tp_size"),
        ("--sp_size 2 --packing_samples", "--packing_samples"),
        ("--adam_offload --zero_stage 3", "FusedAdam"),
        ("--temperature 0", "above 0"),
        ("--micro_train_batch_size 0", "above 0"),
    ],
)
def test_conflicts_raise(argv: str, words: str) -> None:
    with pytest.raises(ConflictError, match=words):
        parse(argv.split())


def test_batches_that_do_not_go_over_the_ranks() -> None:
    args = Arguments(rollout_batch_size=64, train_batch_size=32, micro_train_batch_size=4)
    for world_size in (1, 2, 4, 8):
        args.check_world(world_size)
    with pytest.raises(ConflictError, match="--sp_size 4 is no divisor of 2 ranks"):
        Arguments(sp_size=4).check_world(2)
    with pytest.raises(ConflictError, match="--rollout_batch_size 64 over 3 ranks"):
        args.check_world(3)
    with pytest.raises(ConflictError, match=r"--micro_train_batch_size 4 times 16 \(ranks"):
        args.check_world(16)
