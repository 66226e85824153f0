"""From rewards to advantages. Every tensor is `[batch, time]`; `mask` is true for tokens that were generated."""

import torch

EPSILON = 1e-8


def token_rewards(scores: torch.Tensor, penalty: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Reward of each token: minus `penalty` everywhere, and the score `[batch]` of the answer at its last token."""
    time = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, time, -1).amax(1)
    if (last < 0).any():
        raise ValueError("an answer without tokens has no place for its reward")
    return torch.where(mask, -penalty, 0).scatter_add(1, last[:, None], scores[:, None].to(penalty.dtype))


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (https://arxiv.org/abs/1506.02438): (advantages, returns).

    An answer is one run of tokens; what follows its last token is worth 0. Both results are 0 outside of the mask.
    """
    advantages = torch.zeros_like(values)
    ahead = torch.zeros_like(values[:, 0])
    following = torch.zeros_like(values[:, 0])
    for step in reversed(range(values.shape[1])):
        here = mask[:, step]
        delta = rewards[:, step] + gamma * following - values[:, step]
        ahead = torch.where(here, delta + gamma * lambd * ahead, 0)
        following = torch.where(here, values[:, step], 0)
        advantages[:, step] = ahead
    return advantages, torch.where(mask, advantages + values, 0)


def group_normalised(scores: torch.Tensor, size: int) -> torch.Tensor:
    """Each score `[batch]` within its group of `size` neighbours, less their mean, over their deviation."""
    groups = scores.reshape(-1, size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + EPSILON)).reshape(-1)


def moments(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(count, sum, sum of squares) of what is in the mask, float64 `[3]`: they add up over ranks."""
    chosen = values[mask].double()
    return torch.stack(
        [torch.tensor(float(chosen.numel()), device=chosen.device).double(), chosen.sum(), (chosen**2).sum()]
    )


def whiten(values: torch.Tensor, mask: torch.Tensor, totals: torch.Tensor) -> torch.Tensor:
    """`values` with mean 0 and deviation 1, by the `moments` of all of them; 0 outside of the mask."""
    count, total, squares = totals.unbind()
    mean = total / count
    deviation = (squares / count - mean**2).clamp(min=0).sqrt()
    return torch.where(mask, ((values - mean) / (deviation + EPSILON)).to(values.dtype), 0)
