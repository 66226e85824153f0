"""A checkpoint in the shape of Qwen2-1.5B with random weights, and a reward for what it answers."""

import multiprocessing as mp
from pathlib import Path
from typing import Any

import torch

from integrations.ppo.experience import Rollout

END = "<|endoftext|>"
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LARGE = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}


def even_fraction(rollout: Rollout) -> float:
    """How many of an answer's token ids are even: half of them, as long as nothing was learned."""
    return sum(token % 2 == 0 for token in rollout.response_ids) / len(rollout.response_ids)


def make_checkpoint(folder: Path, *, small: bool, timeout_s: float) -> None:
    """Write one in bfloat16, in a process of its own: what it takes of the device is free again afterwards.

    Raises `RuntimeError` if that process does not end well within `timeout_s`.
    """
    process = mp.get_context("spawn").Process(target=_make, args=(folder, small))
    process.start()
    process.join(timeout_s)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"no checkpoint: its process ended with {process.exitcode} within {timeout_s:g} s")


def _make(folder: Path, small: bool) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        **(SMALL if small else LARGE),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> Any:
    """A token a byte. Of ids that are none of these it makes no text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain: Any = Tokenizer(models.BPE(vocab={letter: id_ for id_, letter in enumerate([END, *alphabet])}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=END, pad_token=END)
