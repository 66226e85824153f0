"""The options of a run. Nothing is changed silently: what does not fit together raises."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from integrations.ppo import conflicts
from integrations.ppo.errors import ConflictError
from wsync import SyncConfig

TOY_REWARDS = ("integrations.ppo.toy:lowercase_fraction",)


def option(default: Any, text: str) -> Any:
    """A field with a default and the line that `--help` prints for it."""
    return field(default=default, metadata={"help": text})


def is_url(reward: str) -> bool:
    """Whether a `--reward` is a server."""
    return reward.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Each field is an option of that name. Sizes are in samples over all ranks, unless they are "micro": per rank."""

    fsdp: bool = option(False, "shard with FSDP2 (fully_shard); without it DeepSpeed does")
    zero_stage: Literal[1, 2, 3] = option(2, "of DeepSpeed")
    bf16: bool = option(False, "compute in bfloat16; the engine's weights are bfloat16 then")
    use_mp_opt: bool = option(False, "with --fsdp --bf16: weights are bfloat16 too, float32 ones are optimizer states")
    fsdp_cpu_offload: bool = option(
        False, "with --fsdp: what trains stays in host memory, and is stepped there; layers visit the device"
    )
    initial_model_shard_size: int = option(0, "ranks that share a copy of each model that is not trained; 0: all")
    pretrain: str = option("", "folder of a transformers checkpoint; without it a byte-level Llama of 107,000 weights")
    critic_pretrain: str = option("", "folder of the critic's checkpoint; default: as --pretrain")
    lora_rank: int = option(0, "train LoRA adapters of this rank in place of the actor's weights; 0: the weights")
    lora_alpha: int = option(16, "adapters are scaled by this over their rank")
    lora_target_modules: list[str] = field(
        default_factory=lambda: [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "lm_head",
        ],
        metadata={"help": "the ends of names of linear layers"},
    )
    seed: int = option(0, "of weights, data order and sampling")
    timeout_s: float = option(3600.0, "longest wait for other ranks; one that dies is noticed at once")

    engine_type: Literal["vllm", "sglang", "hf"] = option("vllm", "what generates")
    engine_tp_size: int = option(1, "ranks that share an engine, by tensor parallelism")
    engine_mem_util: float = option(0.5, "share of a GPU for the engine's weights and KV cache")
    engine_args: str = option("", "JSON of further arguments for vllm.LLM or sglang.Engine")
    sync_args: str = option("", "JSON of wsync.SyncConfig's fields, for syncs of actor and engine")
    disable_engine_sleep: bool = option(False, "leave the engine's weights and KV cache on the device all the time")
    engine_sleep_level: Literal[1, 2] = option(
        1, "1: a sleeping engine's weights are in host memory; 2: nowhere, and waking it is a sync"
    )
    offload_models: bool = option(False, "models in training are in host memory while the engine generates")
    adam_offload: bool = option(False, "optimizer states are in host memory except while training")

    prompt_data: str = option("", "JSONL with a prompt a line; without it random prompts of the toy task")
    eval_data: str = option("", "the same for evaluation")
    input_key: str = option("prompt", "key of the prompt in each line of JSONL")
    label_key: str = option("label", "key of what a reward function may compare with; lines need not have it")
    prompt_max_len: int = option(8, "tokens; longer prompts keep their last ones")
    generate_max_len: int = option(16, "most new tokens")
    temperature: float = option(1.0, "of sampling, and of every log-probability")
    reward: list[str] = field(
        default_factory=lambda: [*TOY_REWARDS],
        metadata={"help": "any number of: module:function, the folder of a reward model, the URL of a server"},
    )
    reward_fn: str = option("integrations.ppo.rewards:total", "module:function that makes one reward of several")
    remote_reward_timeout_s: float = option(60.0, "longest wait for a server's answer")
    remote_reward_retries: int = option(3, "how often a server is asked again")

    rollout_batch_size: int = option(128, "prompts an iteration")
    n_samples_per_prompt: int = option(1, "answers to each prompt")
    micro_rollout_batch_size: int = option(8, "sequences a forward that scores")
    train_batch_size: int = option(128, "sequences an optimizer step")
    micro_train_batch_size: int = option(4, "sequences a forward and backward")
    max_epochs: int = option(2, "times that an iteration's sequences are trained on")
    steps: int = option(40, "iterations; 0, with --eval_before_train, evaluates alone")

    packing_samples: bool = option(False, "put the sequences of a forward into one row, without padding")
    sp_size: int = option(1, "ranks among which every sequence is cut (Ulysses)")
    fused_linear_logprob: bool = option(False, "compute log-probabilities in chunks, and keep no logits")
    chunk_size: int = option(4096, "tokens of a chunk of --fused_linear_logprob")

    actor_learning_rate: float = option(1e-3, "AdamW")
    critic_learning_rate: float = option(1e-3, "AdamW")
    lr_scheduler: str = option("constant_with_warmup", "one of transformers.SchedulerType")
    lr_warmup_steps: int = option(0, "optimizer steps")
    weight_decay: float = option(0.0, "AdamW")
    max_norm: float = option(1.0, "gradients of each model are clipped to this norm, each model's on their own")

    advantage_estimator: Literal["gae", "group_norm"] = option("gae", "group_norm has no critic")
    gamma: float = option(1.0, "discount a token")
    lambd: float = option(0.95, "of GAE")
    whiten_advantages: bool = option(False, "mean 0 and deviation 1 over the tokens of all ranks")
    eps_clip: float = option(0.2, "policy ratio")
    value_clip: float = option(0.2, "how far a value may move in an iteration; 0: anywhere")
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean"] = option("token-mean", "how tokens weigh in a loss")
    importance_cap: float = option(
        0.0, "most that a token weighs in the actor's loss for being likelier to the actor than to the engine; 0: all 1"
    )
    entropy_coef: float = option(0.0, "reward for entropy in the actor's loss")
    init_kl_coef: float = option(0.01, "weight of the KL to the reference; with 0 there is no reference")
    kl_estimator: Literal["k1", "k2", "k3"] = option("k1", "of the KL between actor and reference")
    use_kl_loss: bool = option(False, "KL is a part of the loss and not of the reward")
    kl_target: float = option(0.0, "KL a sequence that the coefficient is adapted to; 0: it stays as it is")
    kl_horizon: int = option(10_000, "sequences in which the coefficient may double")

    trainer: str = option("sync", "a name that was given to register_trainer")
    eval_before_train: bool = option(False, "evaluate before the first iteration")
    eval_every: int = option(0, "iterations; 0: never")
    save_every: int = option(0, "iterations; 0: never")
    ckpt_dir: str = option("", "where checkpoints go, and where a run that finds one goes on from it")
    save_path: str = option("", "where the trained actor goes in the end, as a transformers checkpoint")
    ema_decay: float = option(0.0, "average the actor's weights, and write them beside it; 0: do not")
    log_dir: str = option("", "where numbers, pictures and TensorBoard events go; without it nothing is written")
    plot_every: int = option(10, "iterations from one picture of lengths to the next; 0: none")

    def __post_init__(self) -> None:
        """Raises `ConflictError` for what cannot be, whatever the number of ranks."""
        conflicts.check(self)

    @property
    def has_critic(self) -> bool:
        """Whether the advantages need values."""
        return self.advantage_estimator == "gae"

    @property
    def has_reference(self) -> bool:
        """Whether there is a KL."""
        return self.init_kl_coef > 0

    @property
    def has_frozen_models(self) -> bool:
        """Whether a model is there that is not trained."""
        return self.has_reference or any(Path(one).is_dir() for one in self.reward)

    @property
    def asks_servers(self) -> bool:
        """Whether a reward comes over HTTP."""
        return any(is_url(one) for one in self.reward)

    @property
    def has_warmup(self) -> bool:
        """Whether the scheduler knows one: transformers' constant one leaves its steps out."""
        return self.lr_scheduler != "constant"

    @property
    def reads_data(self) -> bool:
        """Whether there are prompts beside those of the toy task."""
        return bool(self.prompt_data or self.eval_data)

    @property
    def engine_takes_memory(self) -> bool:
        """Whether the engine reserves a share of a GPU."""
        return self.engine_type != "hf"

    @property
    def engine_sleeps(self) -> bool:
        """Whether the engine leaves the device while it does not generate."""
        return not self.disable_engine_sleep

    @property
    def further_engine_args(self) -> dict[str, Any]:
        """What `--engine_args` says, by name."""
        found: dict[str, Any] = json.loads(self.engine_args) if self.engine_args else {}
        return found

    @property
    def sync_config(self) -> SyncConfig:
        """What `--sync_args` says."""
        return SyncConfig(**json.loads(self.sync_args)) if self.sync_args else SyncConfig()

    @property
    def has_toy_reward(self) -> bool:
        """Whether a reward is that of the toy task, which knows byte-level tokens alone."""
        return any(name in TOY_REWARDS for name in self.reward)

    @property
    def evaluates(self) -> bool:
        """Whether there is any evaluation."""
        return self.eval_before_train or self.eval_every > 0


def parse(argv: list[str]) -> Arguments:
    """The arguments on a command line. Prints and exits as argparse does; raises `ConflictError`."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(Arguments, prog="integrations.ppo.train")
    said = "the default, for a command line that says it: the engine sleeps while it does not generate"
    parser.add_argument(
        "--enable_engine_sleep", action="store_false", dest="disable_engine_sleep", default=False, help=said
    )
    if {"--enable_engine_sleep", "--disable_engine_sleep"} <= set(argv):
        raise ConflictError("--enable_engine_sleep and --disable_engine_sleep: choose one")
    (arguments,) = parser.parse_args_into_dataclasses(argv)
    assert isinstance(arguments, Arguments)
    return arguments
