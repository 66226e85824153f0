"""Advantages against values by hand and against a plain reading of the formula."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from integrations.ppo.advantages import gae, group_normalised, moments, token_rewards, whiten

MASK = torch.tensor([[False, True, True, True, False], [True, True, False, False, False]])


def test_rewards_of_tokens() -> None:
    penalty = torch.full(MASK.shape, 0.5)
    rewards = token_rewards(torch.tensor([2.0, 3.0]), penalty, MASK)
    assert rewards.tolist() == [[0, -0.5, -0.5, 1.5, 0], [-0.5, 2.5, 0, 0, 0]]


def test_an_answer_without_tokens_has_no_reward() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        token_rewards(torch.ones(1), torch.zeros(1, 3), torch.zeros(1, 3).bool())


def test_gae_by_hand() -> None:
    rewards = torch.tensor([[9.0, 1.0, 2.0, 4.0, 9.0]])
    values = torch.tensor([[9.0, 0.5, 1.0, 2.0, 9.0]])
    advantages, returns = gae(rewards, values, MASK[:1], gamma=0.5, lambd=0.5)
    # 4 - 2 = 2; 2 + 0.5 * 2 - 1 + 0.25 * 2 = 2.5; 1 + 0.5 * 1 - 0.5 + 0.25 * 2.5 = 1.625
    assert advantages.tolist() == [[0, 1.625, 2.5, 2.0, 0]]
    assert returns.tolist() == [[0, 2.125, 3.5, 4.0, 0]]


@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=8),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_is_the_sum_in_the_paper(
    before: int, tokens: list[tuple[float, float]], gamma: float, lambd: float
) -> None:
    """Whatever stands beside the answer."""
    size = len(tokens)
    row = [(7.0, 7.0)] * before + tokens + [(7.0, 7.0)] * 2
    rewards, values = (torch.tensor([[one[part] for one in row]], dtype=torch.float64) for part in (0, 1))
    mask = torch.zeros_like(rewards).bool()
    mask[:, before : before + size] = True
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lambd=lambd)
    following = [value for _, value in tokens[1:]] + [0.0]
    delta = [reward + gamma * after - value for (reward, value), after in zip(tokens, following, strict=True)]
    for t in range(size):
        wanted = sum((gamma * lambd) ** ahead * delta[t + ahead] for ahead in range(size - t))
        assert float(advantages[0, before + t]) == pytest.approx(wanted, abs=1e-9)
    assert torch.equal(returns[mask], (advantages + values)[mask])
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_gamma_reaches_every_row() -> None:
    """R68: a trainer was seen to use it for the first micro-batch only."""
    rewards, values = torch.ones(2, 3), torch.zeros(2, 3)
    mask = torch.ones(2, 3).bool()
    advantages, _ = gae(rewards, values, mask, gamma=0.5, lambd=1.0)
    assert advantages.tolist() == [[1.75, 1.5, 1.0]] * 2


def test_group_normalised_by_hand() -> None:
    found = group_normalised(torch.tensor([1.0, 3.0, 5.0, 5.0]), 2)
    assert found.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5, 0, 0])


def test_whitening_over_parts_is_that_of_the_whole() -> None:
    values = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    total = moments(values[:1], MASK[:1]) + moments(values[1:], MASK[1:])
    found = whiten(values, MASK, total)
    assert float(found[MASK].mean()) == pytest.approx(0, abs=1e-6)
    assert float(found[MASK].std(unbiased=False)) == pytest.approx(1, abs=1e-6)
    assert not found[~MASK].any()
