"""Small random models of every family in the table, and the tokens that transformers alone generates with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

FAMILIES = ("llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied", "qwen3-moe")
NEW_TOKENS = 16
VOCABULARY = 259
"""Odd: shards are uneven, and engines pad it."""

_CLASSES: Mapping[str, str] = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3-moe": "Qwen3Moe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a model says to `prompts()`."""

    tokens: list[list[int]]
    """Greedy, `NEW_TOKENS` for each prompt."""

    margin: float
    """How far the chosen token's logit is above the next one, at the closest place. Rounding is about 1e-5."""


def prompts() -> list[list[int]]:
    """Two short ones, and one of 70 tokens, which fills several blocks of a prefix cache."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 11, 70)]


def build(family: str, seed: int) -> Any:
    """A transformers model, float32, with random weights that belong to `seed`, large enough to give lively tokens."""
    import transformers

    kind = family.removesuffix("-tied")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
    config = getattr(transformers, f"{_CLASSES[kind]}Config")(
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        tie_word_embeddings=family.endswith("-tied"),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **(experts if kind == "qwen3-moe" else {}),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{_CLASSES[kind]}ForCausalLM")(config).float()
        for name, parameter in model.named_parameters():
            mean = 3.0 if "q_norm" in name or "k_norm" in name else float("norm" in name)
            torch.nn.init.normal_(parameter.data, mean=mean, std=0.05 if "embed" in name else 0.2)
    return model.eval()


def answers_of(family: str, state: Mapping[str, torch.Tensor]) -> Answers:
    """What transformers generates with the weights in `state`, which has its names. A tied weight may come once."""
    model = build(family, 0)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= set(model.all_tied_weights_keys), missing
    return answers(model)


@torch.no_grad()
def answers(model: Any) -> Answers:
    """One prompt at a time."""
    found = [_answer(model, prompt) for prompt in prompts()]
    return Answers(tokens=[tokens for tokens, _ in found], margin=min(margin for _, margin in found))


def _answer(model: Any, prompt: Sequence[int]) -> tuple[list[int], float]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    return output.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())
