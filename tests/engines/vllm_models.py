"""Tiny models in fp32 and the tokens that transformers generates with them: `python -m tests.engines.vllm_models DIR`.

For each kind there are weights "a" and "b", as checkpoint folders. `expected.json` has the tokens by folder name.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

MAX_TOKENS = 16
KINDS = ("llama", "tied", "bias", "moe")


def prompts(vocab_size: int = 256) -> list[list[int]]:
    """Three short prompts, and one of 150 tokens that fills several blocks of the prefix cache."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in (3, 7, 12, 150)]


def build(kind: str, seed: int) -> Any:
    """A random model: Llama with a padded vocabulary, Qwen3 with tied embeddings or with experts, Qwen2 with biases."""
    import transformers as hf

    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model: Any
    if kind == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**shape, head_dim=32, vocab_size=259, tie_word_embeddings=False))
    elif kind == "tied":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**shape, head_dim=32, vocab_size=256, tie_word_embeddings=True))
    elif kind == "bias":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**shape, vocab_size=256, tie_word_embeddings=True))
    else:
        experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**shape, **experts, head_dim=32, vocab_size=256))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter.data, mean=float("norm" in name), std=0.05 if "embed" in name else 0.3)
    return model.float().eval()


def generate(model: Any, prompt: Sequence[int]) -> list[int]:
    """Greedy tokens of transformers."""
    output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=MAX_TOKENS)
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def main(folder: Path) -> None:
    """Write all of it into `folder`."""
    expected = {}
    for kind in KINDS:
        for seed, weights in enumerate("ab"):
            model = build(kind, seed)
            model.save_pretrained(folder / f"{kind}_{weights}")
            with torch.no_grad():
                expected[f"{kind}_{weights}"] = [generate(model, prompt) for prompt in prompts()]
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
