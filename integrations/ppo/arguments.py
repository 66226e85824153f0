"""The options of a run. Nothing is changed silently: what does not fit together raises."""

from dataclasses import dataclass, field
from typing import Any, Literal

from integrations.ppo.errors import ConflictError

POSITIVE = (
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
    "steps",
    "max_norm",
    "chunk_size",
    "remote_reward_timeout_s",
    "kl_horizon",
)
TOY_REWARDS = ("integrations.ppo.toy:lowercase_fraction",)


def option(default: Any, text: str) -> Any:
    """A field with a default and the line that `--help` prints for it."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Each field is an option of that name. Sizes are in samples over all ranks, unless they are "micro": per rank."""

    fsdp: bool = option(False, "shard with FSDP2 (fully_shard); without it DeepSpeed does")
    zero_stage: Literal[1, 2, 3] = option(2, "of DeepSpeed")
    bf16: bool = option(False, "compute in bfloat16; the engine's weights are bfloat16 then")
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

    engine_type: Literal["vllm", "sglang", "hf"] = option("vllm", "what generates")
    engine_tp_size: int = option(1, "ranks that share an engine, by tensor parallelism")
    engine_mem_util: float = option(0.5, "share of a GPU for the engine's weights and KV cache")
    disable_engine_sleep: bool = option(False, "leave the engine's weights and KV cache on the device all the time")
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
    steps: int = option(40, "iterations")

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
    entropy_coef: float = option(0.0, "reward for entropy in the actor's loss")
    init_kl_coef: float = option(0.01, "weight of the KL to the reference; with 0 there is no reference")
    kl_estimator: Literal["k1", "k2", "k3"] = option("k1", "of the KL between actor and reference")
    use_kl_loss: bool = option(False, "KL is a part of the loss and not of the reward")
    kl_target: float = option(0.0, "KL a sequence that the coefficient is adapted to; 0: it stays as it is")
    kl_horizon: int = option(10_000, "sequences in which the coefficient may double")

    trainer: str = option("sync", "a name that was given to register_trainer")
    eval_every: int = option(0, "iterations; 0: never")
    save_every: int = option(0, "iterations; 0: never")
    ckpt_dir: str = option("", "where checkpoints go, and where a run that finds one goes on from it")
    save_path: str = option("", "where the trained actor goes in the end, as a transformers checkpoint")
    ema_decay: float = option(0.0, "average the actor's weights, and write them beside it; 0: do not")
    log_dir: str = option("", "where numbers, pictures and TensorBoard events go; without it nothing is written")
    plot_every: int = option(10, "iterations from one picture of lengths to the next; 0: none")

    def __post_init__(self) -> None:
        """Raises `ConflictError` for what cannot be, whatever the number of ranks."""
        for name in POSITIVE:
            if getattr(self, name) <= 0:
                raise ConflictError(f"--{name} is {getattr(self, name)}; it must be above 0")
        sequences = self.rollout_batch_size * self.n_samples_per_prompt
        if sequences % self.train_batch_size:
            raise ConflictError(
                f"an iteration has {sequences} sequences (--rollout_batch_size {self.rollout_batch_size} times "
                f"--n_samples_per_prompt {self.n_samples_per_prompt}): no multiple of --train_batch_size "
                f"{self.train_batch_size}"
            )
        if self.advantage_estimator == "group_norm" and self.n_samples_per_prompt < 2:
            raise ConflictError("--advantage_estimator group_norm compares answers: --n_samples_per_prompt 2 or more")
        if self.init_kl_coef < 0:
            raise ConflictError(f"--init_kl_coef is {self.init_kl_coef}; it must not be below 0")
        if not self.init_kl_coef and (self.use_kl_loss or self.kl_target):
            raise ConflictError("--use_kl_loss and --kl_target need a reference: --init_kl_coef above 0")
        if self.use_kl_loss and self.kl_target:
            raise ConflictError("--kl_target adapts the KL in the reward; it has no effect with --use_kl_loss")
        if self.engine_type == "hf" and self.engine_tp_size != 1:
            raise ConflictError("--engine_type hf has no tensor parallelism: --engine_tp_size 1")
        if self.adam_offload and not self.fsdp and self.zero_stage == 3:
            raise ConflictError(
                "--adam_offload with --zero_stage 3: DeepSpeed moves states of its FusedAdam only, and these are "
                "those of torch's AdamW; --zero_stage 2 or --fsdp"
            )
        if self.sp_size > 1 and self.packing_samples:
            raise ConflictError("--packing_samples leaves no padding and --sp_size cuts padded sequences: choose one")
        if self.save_every and not self.ckpt_dir:
            raise ConflictError("--save_every needs --ckpt_dir")
        if self.ema_decay and not self.save_path:
            raise ConflictError("--ema_decay is of use to --save_path alone")
        if not 0 <= self.ema_decay < 1:
            raise ConflictError(f"--ema_decay is {self.ema_decay}; it is from 0 to below 1")
        if self.critic_pretrain and not self.has_critic:
            raise ConflictError("--critic_pretrain without a critic: --advantage_estimator group_norm has none")
        if self.prompt_data and not self.pretrain and any(name in TOY_REWARDS for name in self.reward):
            raise ConflictError(f"--prompt_data with the reward of the toy task, {self.reward}: pass --reward")

    @property
    def has_critic(self) -> bool:
        """Whether the advantages need values."""
        return self.advantage_estimator == "gae"

    @property
    def has_reference(self) -> bool:
        """Whether there is a KL."""
        return self.init_kl_coef > 0

    def check_world(self, world_size: int) -> None:
        """Raises `ConflictError` if batches cannot be spread over that many ranks."""
        if self.rollout_batch_size % world_size:
            raise ConflictError(f"--rollout_batch_size {self.rollout_batch_size} over {world_size} ranks: no multiple")
        if world_size % self.sp_size:
            raise ConflictError(f"--sp_size {self.sp_size} is no divisor of {world_size} ranks")
        share = self.micro_train_batch_size * (world_size // self.sp_size)
        if self.train_batch_size % share:
            raise ConflictError(
                f"--train_batch_size {self.train_batch_size} is no multiple of --micro_train_batch_size "
                f"{self.micro_train_batch_size} times {world_size // self.sp_size} (ranks by --sp_size)"
            )


def parse(argv: list[str]) -> Arguments:
    """The arguments on a command line. Prints and exits as argparse does; raises `ConflictError`."""
    from transformers import HfArgumentParser

    (arguments,) = HfArgumentParser(Arguments, prog="integrations.ppo.train").parse_args_into_dataclasses(argv)
    assert isinstance(arguments, Arguments)
    return arguments
