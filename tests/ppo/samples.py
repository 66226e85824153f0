"""Experience and rollouts with random numbers, for tests."""

import torch

from integrations.ppo.experience import Experience, Rollout, padded


def experience(lengths: list[tuple[int, int]], seed: int = 0) -> Experience:
    """A batch of answers of (prompt tokens, response tokens)."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(number: int) -> list[int]:
        return torch.randint(3, 259, (number,), generator=generator).tolist()

    sequences, attention_mask, action_mask = padded(
        [tokens(prompt) for prompt, _ in lengths], [tokens(response) for _, response in lengths]
    )
    names = ("log_probs", "engine_log_probs", "reference_log_probs", "values", "advantages", "returns")
    numbers = {name: torch.randn(action_mask.shape, generator=generator) * action_mask for name in names}
    return Experience(sequences=sequences, attention_mask=attention_mask, action_mask=action_mask, **numbers)


def rollout(response_ids: list[int], label: str | None = None) -> Rollout:
    """With these tokens."""
    return Rollout(
        prompt="p",
        response="r",
        prompt_ids=[5],
        response_ids=response_ids,
        engine_log_probs=[-0.25 * token for token in response_ids],
        label=label,
    )
