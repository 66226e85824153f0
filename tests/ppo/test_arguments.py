"""Defaults, what a command line becomes, and what does not go together."""

from dataclasses import FrozenInstanceError, fields

import pytest

from integrations.ppo.arguments import Arguments, parse
from integrations.ppo.conflicts import check_world
from integrations.ppo.errors import ConflictError


def test_defaults_and_round_trip() -> None:
    assert parse([]) == Arguments()
    args = parse(["--fsdp", "--seed", "3", "--reward", "a:b", "c:d", "--temperature", "0.7"])
    assert args == Arguments(fsdp=True, seed=3, reward=["a:b", "c:d"], temperature=0.7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine_tp_size", 1),
        ("engine_mem_util", 0.5),
        ("disable_engine_sleep", False),
        ("fsdp", False),
        ("fsdp_cpu_offload", False),
        ("use_mp_opt", False),
        ("packing_samples", False),
        ("sp_size", 1),
        ("fused_linear_logprob", False),
        ("chunk_size", 4096),
        ("log_dir", ""),
        ("plot_every", 10),
        ("engine_type", "vllm"),
        ("zero_stage", 2),
        ("adam_offload", False),
        ("bf16", False),
        ("micro_train_batch_size", 4),
        ("train_batch_size", 128),
        ("micro_rollout_batch_size", 8),
        ("init_kl_coef", 0.01),
        ("initial_model_shard_size", 0),
    ],
)
def test_defaults_are_those_that_are_known(name: str, value: object) -> None:
    """R49, R50; where None was known, what is empty or 0 means the same."""
    assert getattr(parse([]), name) == value


def test_nobody_rewrites_an_option() -> None:
    """R65: one was seen to be set to something else without a word."""
    for one in fields(Arguments):
        with pytest.raises(FrozenInstanceError):
            setattr(parse([]), one.name, None)


def test_sleep_may_be_asked_for_by_name() -> None:
    assert parse(["--enable_engine_sleep"]) == parse([])
    assert parse(["--disable_engine_sleep"]).disable_engine_sleep
    with pytest.raises(ConflictError, match="choose one"):
        parse(["--enable_engine_sleep", "--disable_engine_sleep"])


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
        ("--disable_engine_sleep --engine_sleep_level 2", "no effect without an engine that sleeps"),
        ("--engine_type hf --engine_args {}", "is for vllm and sglang"),
        ("--engine_args {", "is no JSON"),
        ("--engine_args [1]", "is no JSON object"),
        ('--engine_args {"seed":1,"dtype":"float16","quantization":"fp8"}', "by itself: dtype, seed$"),
        ('--engine_type sglang --engine_args {"model":"x","tp_size":2}', "by itself: tp_size$"),
        ("--sync_args {", "is no JSON"),
        ('--sync_args ["digest"]', "is no JSON object"),
        ('--sync_args {"backend":"naive"}', "unexpected keyword argument 'backend'"),
        ('--sync_args {"verify":"words"}', "verify is 'words'"),
        ('--sync_args {"lora":"adapter"} --engine_sleep_level 2', "level 1$"),
        ("--sp_size 2 --packing_samples", "--packing_samples"),
        ("--adam_offload --zero_stage 3", "FusedAdam"),
        ("--fsdp_cpu_offload", "without --fsdp"),
        ("--fsdp --fsdp_cpu_offload --adam_offload", "leave --adam_offload out"),
        ("--fsdp --fsdp_cpu_offload --offload_models", "leave --offload_models out"),
        ("--bf16 --use_mp_opt", "without --fsdp"),
        ("--fsdp --use_mp_opt", "without --bf16"),
        ("--fsdp --zero_stage 3", "--zero_stage 3 is of DeepSpeed"),
        ("--chunk_size 64", "without --fused_linear_logprob"),
        ("--kl_horizon 64", "without --kl_target"),
        ("--lora_alpha 64", "without --lora_rank"),
        ("--advantage_estimator group_norm --n_samples_per_prompt 2 --gamma 0.9", "without a critic"),
        ("--eval_data x.jsonl", "without --eval_every"),
        ("--prompt_data x.jsonl --pretrain x --eval_every 1", "pass --eval_data"),
        ("--input_key question", "without --prompt_data or --eval_data"),
        ("--eval_every 1 --label_key answer", "without --prompt_data or --eval_data"),
        ("--remote_reward_timeout_s 5", "without a --reward that is a URL"),
        ("--remote_reward_retries 0 --reward a:http", "without a --reward that is a URL"),
        ("--init_kl_coef 0 --initial_model_shard_size 1", "without a reference or a reward model"),
        ("--lr_scheduler constant --lr_warmup_steps 5", "without an --lr_scheduler that warms up"),
        ("--engine_type hf --engine_mem_util 0.8", "without --engine_type vllm or sglang"),
        ("--plot_every 5", "without --log_dir"),
        ("--steps 0", "--eval_before_train"),
        ("--gamma 1.5", "above 1"),
        ("--engine_mem_util 1.5", "above 1"),
        ("--entropy_coef -1", "below 0"),
        ("--temperature 0", "above 0"),
        ("--micro_train_batch_size 0", "above 0"),
    ],
)
def test_conflicts_raise(argv: str, words: str) -> None:
    """R71 among them: --fsdp_cpu_offload was seen to clear --adam_offload in one place, and not where it is read."""
    with pytest.raises(ConflictError, match=words):
        parse(argv.split())


@pytest.mark.parametrize(
    "argv",
    [
        "--eval_every 1 --eval_data x.jsonl --input_key question --label_key answer",
        "--reward a:b https://judge --remote_reward_timeout_s 5 --remote_reward_retries 0",
        "--init_kl_coef 0 --initial_model_shard_size 1 --reward .",
        "--lr_scheduler linear --lr_warmup_steps 5",
        "--engine_type sglang --engine_mem_util 0.8",
        "--plot_every 5 --log_dir x",
    ],
)
def test_what_has_an_effect_is_taken(argv: str) -> None:
    parse(argv.split())


def test_batches_that_do_not_go_over_the_ranks() -> None:
    args = Arguments(rollout_batch_size=64, train_batch_size=32, micro_train_batch_size=4)
    for world_size in (1, 2, 4, 8):
        check_world(args, world_size)
    with pytest.raises(ConflictError, match="--sp_size 4 is no divisor of 2 ranks"):
        check_world(Arguments(sp_size=4), 2)
    with pytest.raises(ConflictError, match="--initial_model_shard_size 4 is no divisor of 2 ranks"):
        check_world(Arguments(initial_model_shard_size=4), 2)
    with pytest.raises(ConflictError, match="--rollout_batch_size 64 over 3 ranks"):
        check_world(args, 3)
    with pytest.raises(ConflictError, match=r"--micro_train_batch_size 4 times 16 \(ranks"):
        check_world(args, 16)
