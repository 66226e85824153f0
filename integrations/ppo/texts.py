"""From texts to tokens."""

from typing import Any

from integrations.ppo.arguments import Arguments


def tokenizer(args: Arguments) -> Any:
    """Of the checkpoint, or bytes."""
    from transformers import AutoTokenizer, ByT5Tokenizer

    return AutoTokenizer.from_pretrained(args.pretrain) if args.pretrain else ByT5Tokenizer(extra_ids=0)


def encode(text_tokenizer: Any, text: str, longest: int) -> list[int]:
    """Token ids of a prompt, without special ones: the last `longest`. Raises `ValueError` if there are none."""
    ids: list[int] = text_tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise ValueError(f"the prompt {text!r} has no tokens")
    return ids[-longest:]
