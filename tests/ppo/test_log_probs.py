"""Log-probabilities, entropy and values against a plain computation."""

from typing import Any

import torch

from integrations.ppo.arguments import Arguments
from integrations.ppo.experience import padded
from integrations.ppo.log_probs import entropy, token_log_probs, token_values
from integrations.ppo.models import critic, policy


def test_padding_changes_nothing() -> None:
    model: Any = policy(Arguments())
    prompts, answers = [[10, 20, 30], [40]], [[50, 60], [70, 80, 90, 100, 110]]
    sequences, attention_mask, action_mask = padded(prompts, answers)
    with torch.no_grad():
        said, logits = token_log_probs(model, sequences, attention_mask, 0.5)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ids = torch.tensor([[*prompt, *answer]])
            plain = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / 0.5, -1)
            wanted = plain.gather(-1, ids[0, 1:, None])[:, 0][len(prompt) - 1 :]
            assert torch.allclose(said[row][action_mask[row]], wanted, atol=1e-6)
    found = entropy(logits)
    assert torch.allclose(found, torch.special.entr(logits.softmax(-1)).sum(-1), atol=1e-5)


def test_values_are_of_the_place_before_each_token() -> None:
    model: Any = critic(Arguments())
    sequences, attention_mask, _ = padded([[10, 20]], [[30, 40]])
    with torch.no_grad():
        found = token_values(model, sequences, attention_mask)
        assert found.shape == (1, 3)
        assert torch.equal(found[0], model(input_ids=sequences).logits[0, :-1, 0])


def test_models_belong_to_the_seed() -> None:
    one, same, other = (policy(Arguments(seed=seed)).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
