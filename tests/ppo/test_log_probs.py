"""Log-probabilities, entropy and values against a plain computation; packed, and in chunks."""

from typing import Any

import pytest
import torch

from integrations.ppo.arguments import Arguments
from integrations.ppo.errors import ConflictError
from integrations.ppo.experience import padded
from integrations.ppo.log_probs import Scoring, token_log_probs, token_values
from integrations.ppo.models import adapted, critic, policy

PROMPTS, ANSWERS = [[10, 20, 30], [40], [8, 9]], [[50, 60], [70, 80, 90, 100, 110], [7]]
SCORINGS = [
    Scoring(temperature=0.5),
    Scoring(temperature=0.5, packing=True),
    *(Scoring(temperature=0.5, chunk_size=size) for size in (1, 5, 4096)),
    Scoring(temperature=0.5, packing=True, chunk_size=4),
]


def grads(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_all_ways_are_the_plain_one(scoring: Scoring, lora_rank: int) -> None:
    """One sequence at a time, by torch's own functions: numbers and gradients."""
    args = Arguments(lora_rank=lora_rank)
    model: Any = adapted(args, policy(args))
    sequences, attention_mask, action_mask = padded(PROMPTS, ANSWERS)
    said, entropy = token_log_probs(model, sequences, attention_mask, scoring, entropy=True)
    assert entropy is not None
    (said + entropy)[action_mask].sum().backward()  # type: ignore[no-untyped-call]
    found = grads(model)
    model.zero_grad()
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        ids = torch.tensor([[*prompt, *answer]])
        plain = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / 0.5, -1)[len(prompt) - 1 :]
        chosen = plain.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        spread = torch.special.entr(plain.exp()).sum(-1)
        assert torch.allclose(said[row][action_mask[row]], chosen, atol=1e-5)
        assert torch.allclose(entropy[row][action_mask[row]], spread, atol=1e-5)
        (chosen + spread).sum().backward()
    wanted = grads(model)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert torch.allclose(found[name], grad, atol=1e-4), name


def test_chunks_keep_no_logits() -> None:
    model: Any = policy(Arguments())
    sequences, attention_mask, _ = padded([list(range(3, 23))] * 4, [list(range(30, 50))] * 4)
    vocabulary = model.config.vocab_size
    kept: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[-1:] == (vocabulary,) and tensor.dim() > 1:
            kept.append(tensor.numel() // vocabulary)
        return tensor

    for chunk_size in (None, 8):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            token_log_probs(model, sequences, attention_mask, Scoring(temperature=1.0, chunk_size=chunk_size))
        if chunk_size is None:
            assert max(kept) >= sequences.numel() - len(sequences)
        else:
            assert max(kept, default=0) <= chunk_size


def test_the_head_is_itself_again() -> None:
    model: Any = policy(Arguments())
    sequences, attention_mask, _ = padded(PROMPTS, ANSWERS)
    before = model(input_ids=sequences).logits
    token_log_probs(model, sequences, attention_mask, Scoring(temperature=1.0, chunk_size=2))
    assert torch.equal(model(input_ids=sequences).logits, before)


def test_a_model_that_changes_its_logits_afterwards() -> None:
    model: Any = policy(Arguments())
    model.config.final_logit_softcapping = 30.0
    sequences, attention_mask, _ = padded(PROMPTS, ANSWERS)
    with pytest.raises(ConflictError, match="final_logit_softcapping"):
        token_log_probs(model, sequences, attention_mask, Scoring(temperature=1.0, chunk_size=2))


@pytest.mark.parametrize("packing", [False, True])
def test_values_are_of_the_place_before_each_token(packing: bool) -> None:
    model: Any = critic(Arguments())
    sequences, attention_mask, action_mask = padded(PROMPTS, ANSWERS)
    with torch.no_grad():
        found = token_values(model, sequences, attention_mask, Scoring(temperature=1.0, packing=packing))
        for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
            plain = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0, :-1, 0]
            assert torch.allclose(found[row][action_mask[row]], plain[len(prompt) - 1 :], atol=1e-6)


def test_models_belong_to_the_seed() -> None:
    one, same, other = (policy(Arguments(seed=seed)).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
