"""The models of a run, by transformers: from a checkpoint, or the toy."""

from typing import Any

import torch

from integrations.ppo import toy
from integrations.ppo.arguments import Arguments
from integrations.ppo.errors import ConflictError
from integrations.ppo.randomness import kept_random_state
from integrations.ppo.sequence_parallel import ATTENTION


def policy(args: Arguments) -> Any:
    """Actor, reference and the engine's first weights: all ranks and all calls get the same. fp32."""
    from transformers import AutoModelForCausalLM

    if args.pretrain:
        return AutoModelForCausalLM.from_pretrained(args.pretrain, dtype=torch.float32)
    with kept_random_state():
        torch.manual_seed(args.seed)
        return AutoModelForCausalLM.from_config(_toy(args))


def check(args: Arguments, text_tokenizer: Any, config: Any) -> None:
    """Raises `ConflictError` if options do not fit the tokenizer and the configuration of the checkpoint."""
    longest = args.prompt_max_len + args.generate_max_len
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise ConflictError(
            f"--prompt_max_len {args.prompt_max_len} and --generate_max_len {args.generate_max_len} are {longest} "
            f"tokens; the model has {positions} positions"
        )
    if args.has_toy_reward and text_tokenizer("a", add_special_tokens=False).input_ids != [toy.FIRST_BYTE + ord("a")]:
        raise ConflictError(
            f"the reward of the toy task knows byte-level tokens, and {args.pretrain} has others: --reward"
        )


def adapted(args: Arguments, model: Any) -> Any:
    """`model` with what trains of it: LoRA adapters, the same on all ranks, or itself."""
    if not args.lora_rank:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=args.lora_target_modules)
    with kept_random_state():
        torch.manual_seed(args.seed + 2)
        return get_peft_model(model, config)


def parallel(args: Arguments, model: Any) -> Any:
    """`model`, with `--sp_size` with attention over slices. Raises `ConflictError` if its heads do not go into it."""
    if args.sp_size > 1:
        heads = model.config.num_attention_heads
        if heads % args.sp_size:
            raise ConflictError(f"--sp_size {args.sp_size} is no divisor of the model's {heads} attention heads")
        model.set_attn_implementation(ATTENTION)
    return model


def critic(args: Arguments) -> Any:
    """A value for each token; fp32. What a checkpoint does not have is random, the same on all ranks.

    Without transformers' dropout before the head: values in training must be comparable with recorded ones.
    """
    from transformers import AutoConfig, AutoModelForTokenClassification

    path = args.critic_pretrain or args.pretrain
    config = AutoConfig.from_pretrained(path) if path else _toy(args)
    config.num_labels, config.classifier_dropout = 1, 0.0
    with kept_random_state():
        torch.manual_seed(args.seed + 1)
        if path:
            return AutoModelForTokenClassification.from_pretrained(path, config=config, dtype=torch.float32)
        return AutoModelForTokenClassification.from_config(config)


def _toy(args: Arguments) -> Any:
    return toy.config(args.prompt_max_len + args.generate_max_len + toy.SPARE_POSITIONS)
