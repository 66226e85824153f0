"""A task that needs no download: answer in lowercase letters. Random bytes have 26 of 259."""

import random
import string

from transformers import LlamaConfig

from integrations.ppo.experience import Rollout

FIRST_BYTE = 3
"""Token id of byte 0 in transformers' ByT5Tokenizer; before it come padding, end of sequence and unknown."""

SPARE_POSITIONS = 8
"""SGLang lets no answer reach the last positions of a model."""

LOWERCASE = frozenset(FIRST_BYTE + ord(letter) for letter in string.ascii_lowercase)


def lowercase_fraction(rollout: Rollout) -> float:
    """How much of the answer is lowercase letters. The end-of-sequence token is none."""
    return sum(token in LOWERCASE for token in rollout.response_ids) / len(rollout.response_ids)


def prompts(number: int, seed: int) -> list[str]:
    """Random letters and digits, 2 to 8 of them."""
    chosen = random.Random(seed)
    letters = string.ascii_letters + string.digits
    return ["".join(chosen.choices(letters, k=chosen.randint(2, 8))) for _ in range(number)]


def config(max_len: int) -> LlamaConfig:
    """A byte-level Llama, as small as vLLM's CPU build takes it: that wants heads of 32."""
    return LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_len,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
