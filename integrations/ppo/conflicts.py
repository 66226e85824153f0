"""What does not fit together on a command line. An option that would have no effect is a conflict too."""

import json
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from integrations.ppo.errors import ConflictError
from wsync import ConfigError

if TYPE_CHECKING:
    from integrations.ppo.arguments import Arguments

POSITIVE = (
    "timeout_s",
    "engine_tp_size",
    "sp_size",
    "engine_mem_util",
    "prompt_max_len",
    "generate_max_len",
    "temperature",
    "rollout_batch_size",
    "n_samples_per_prompt",
    "micro_rollout_batch_size",
    "train_batch_size",
    "micro_train_batch_size",
    "max_epochs",
    "max_norm",
    "chunk_size",
    "eps_clip",
    "remote_reward_timeout_s",
    "kl_horizon",
)
NOT_NEGATIVE = (
    "initial_model_shard_size",
    "lora_rank",
    "remote_reward_retries",
    "steps",
    "lr_warmup_steps",
    "weight_decay",
    "gamma",
    "lambd",
    "value_clip",
    "importance_cap",
    "entropy_coef",
    "init_kl_coef",
    "kl_target",
    "eval_every",
    "save_every",
    "ema_decay",
    "plot_every",
)
AT_MOST_ONE = ("engine_mem_util", "gamma", "lambd")

WITHOUT_EFFECT = (
    ("fsdp", "--fsdp", ("use_mp_opt", "fsdp_cpu_offload")),
    ("bf16", "--bf16: else weights are float32 anyway", ("use_mp_opt",)),
    ("lora_rank", "--lora_rank", ("lora_alpha", "lora_target_modules")),
    ("fused_linear_logprob", "--fused_linear_logprob", ("chunk_size",)),
    (
        "has_critic",
        "a critic, which --advantage_estimator gae has",
        ("critic_pretrain", "critic_learning_rate", "gamma", "lambd", "value_clip"),
    ),
    ("has_reference", "a reference: --init_kl_coef above 0", ("use_kl_loss", "kl_target", "kl_estimator")),
    ("kl_target", "--kl_target", ("kl_horizon",)),
    ("engine_sleeps", "an engine that sleeps, which --disable_engine_sleep keeps it from", ("engine_sleep_level",)),
    ("evaluates", "--eval_every or --eval_before_train", ("eval_data",)),
    ("reads_data", "--prompt_data or --eval_data", ("input_key", "label_key")),
    ("asks_servers", "a --reward that is a URL", ("remote_reward_timeout_s", "remote_reward_retries")),
    ("has_frozen_models", "a reference or a reward model", ("initial_model_shard_size",)),
    ("has_warmup", "an --lr_scheduler that warms up", ("lr_warmup_steps",)),
    ("engine_takes_memory", "--engine_type vllm or sglang", ("engine_mem_util",)),
    ("log_dir", "--log_dir", ("plot_every",)),
    ("ckpt_dir", "--ckpt_dir", ("save_every",)),
    ("save_path", "--save_path", ("ema_decay",)),
)
"""(what is needed, as a message names it, options that do nothing without it)."""

SET_BY_TRAINER = {
    "vllm": (
        "model",
        "dtype",
        "skip_tokenizer_init",
        "max_model_len",
        "tensor_parallel_size",
        "distributed_executor_backend",
        "logprobs_mode",
        "seed",
        "gpu_memory_utilization",
        "enable_sleep_mode",
    ),
    "sglang": (
        "model_path",
        "dtype",
        "tp_size",
        "skip_tokenizer_init",
        "skip_server_warmup",
        "random_seed",
        "device",
        "base_gpu_id",
        "mem_fraction_static",
        "enable_memory_saver",
        "enable_weights_cpu_backup",
    ),
}
"""Arguments of each engine that are not for `--engine_args`. Others that the trainer has a default for are."""


def check(args: "Arguments") -> None:
    """Raises `ConflictError` for what cannot be, whatever the number of ranks."""
    _check_ranges(args)
    _check_effects(args)
    _check_batches(args)
    _check_placement(args)
    _check_engine_args(args)
    _check_sync_args(args)
    _check_data(args)


def check_world(args: "Arguments", world_size: int) -> None:
    """Raises `ConflictError` if batches or models cannot be spread over that many ranks."""
    if args.rollout_batch_size % world_size:
        raise ConflictError(f"--rollout_batch_size {args.rollout_batch_size} over {world_size} ranks: no multiple")
    if world_size % args.sp_size:
        raise ConflictError(f"--sp_size {args.sp_size} is no divisor of {world_size} ranks")
    if args.initial_model_shard_size and world_size % args.initial_model_shard_size:
        raise ConflictError(
            f"--initial_model_shard_size {args.initial_model_shard_size} is no divisor of {world_size} ranks"
        )
    share = args.micro_train_batch_size * (world_size // args.sp_size)
    if args.train_batch_size % share:
        raise ConflictError(
            f"--train_batch_size {args.train_batch_size} is no multiple of --micro_train_batch_size "
            f"{args.micro_train_batch_size} times {world_size // args.sp_size} (ranks by --sp_size)"
        )


def _check_ranges(args: "Arguments") -> None:
    for name in POSITIVE:
        if getattr(args, name) <= 0:
            raise ConflictError(f"--{name} is {getattr(args, name)}; it must be above 0")
    for name in NOT_NEGATIVE:
        if getattr(args, name) < 0:
            raise ConflictError(f"--{name} is {getattr(args, name)}; it must not be below 0")
    for name in AT_MOST_ONE:
        if getattr(args, name) > 1:
            raise ConflictError(f"--{name} is {getattr(args, name)}; it must not be above 1")
    if args.ema_decay >= 1:
        raise ConflictError(f"--ema_decay is {args.ema_decay}; it is from 0 to below 1")


def _check_effects(args: "Arguments") -> None:
    defaults = {one.name: _default(one) for one in fields(args)}
    for needed, said, names in WITHOUT_EFFECT:
        if getattr(args, needed):
            continue
        for name in names:
            if getattr(args, name) != defaults[name]:
                raise ConflictError(f"--{name} {getattr(args, name)} has no effect without {said}")
    if args.fsdp and args.zero_stage != defaults["zero_stage"]:
        raise ConflictError(f"--zero_stage {args.zero_stage} is of DeepSpeed, and --fsdp does without it: choose one")
    if args.use_kl_loss and args.kl_target:
        raise ConflictError("--kl_target adapts the KL in the reward; it has no effect with --use_kl_loss")


def _default(option: Any) -> object:
    return option.default_factory() if option.default is MISSING else option.default


def _check_batches(args: "Arguments") -> None:
    sequences = args.rollout_batch_size * args.n_samples_per_prompt
    if sequences % args.train_batch_size:
        raise ConflictError(
            f"an iteration has {sequences} sequences (--rollout_batch_size {args.rollout_batch_size} times "
            f"--n_samples_per_prompt {args.n_samples_per_prompt}): no multiple of --train_batch_size "
            f"{args.train_batch_size}"
        )
    if args.advantage_estimator == "group_norm" and args.n_samples_per_prompt < 2:
        raise ConflictError("--advantage_estimator group_norm compares answers: --n_samples_per_prompt 2 or more")
    if args.sp_size > 1 and args.packing_samples:
        raise ConflictError("--packing_samples leaves no padding and --sp_size cuts padded sequences: choose one")


def _check_placement(args: "Arguments") -> None:
    if args.engine_type == "hf" and args.engine_tp_size != 1:
        raise ConflictError("--engine_type hf has no tensor parallelism: --engine_tp_size 1")
    if args.adam_offload and not args.fsdp and args.zero_stage == 3:
        raise ConflictError(
            "--adam_offload with --zero_stage 3: DeepSpeed moves states of its FusedAdam only, and these are "
            "those of torch's AdamW; --zero_stage 2 or --fsdp"
        )
    for name in ("offload_models", "adam_offload"):
        if args.fsdp_cpu_offload and getattr(args, name):
            raise ConflictError(
                f"--fsdp_cpu_offload keeps weights and optimizer states in host memory already; leave --{name} out"
            )


def _check_engine_args(args: "Arguments") -> None:
    if not args.engine_args:
        return
    if args.engine_type not in SET_BY_TRAINER:
        raise ConflictError(f"--engine_args is for {' and '.join(SET_BY_TRAINER)}; --engine_type is {args.engine_type}")
    found = _json_object("engine_args", args.engine_args)
    if taken := [name for name in SET_BY_TRAINER[args.engine_type] if name in found]:
        raise ConflictError(f"--engine_args names what the trainer sets by itself: {', '.join(taken)}")


def _check_sync_args(args: "Arguments") -> None:
    if not args.sync_args:
        return
    _json_object("sync_args", args.sync_args)
    try:
        config = args.sync_config
    except (TypeError, ConfigError) as error:
        raise ConflictError(f"--sync_args {args.sync_args}: {error}") from error
    if config.lora == "adapter" and args.engine_sleep_level == 2:
        raise ConflictError(
            "--engine_sleep_level 2 drops base weights, which adapters alone do not bring back: level 1"
        )


def _json_object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConflictError(f"--{name} {text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConflictError(f"--{name} {text!r} is no JSON object: names and values are wanted")
    return found


def _check_data(args: "Arguments") -> None:
    if not args.steps and not args.eval_before_train:
        raise ConflictError("--steps 0 has nothing to do without --eval_before_train")
    if args.prompt_data and not args.pretrain and args.has_toy_reward:
        raise ConflictError(f"--prompt_data with the reward of the toy task, {args.reward}: pass --reward")
    if args.prompt_data and args.evaluates and not args.eval_data:
        raise ConflictError("--prompt_data and an evaluation, which would be of toy prompts: pass --eval_data")
