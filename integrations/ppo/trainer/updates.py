"""One optimizer step of actor and critic."""

from collections.abc import Sequence

import torch

from integrations.ppo.arguments import Arguments
from integrations.ppo.experience import Experience
from integrations.ppo.kl import estimate_kl
from integrations.ppo.log_probs import token_log_probs, token_values
from integrations.ppo.losses import aggregate, policy_loss, value_loss, weights
from integrations.ppo.strategy.base import Strategy


def update(
    args: Arguments, strategy: Strategy, micro_batches: Sequence[Experience], kl_coef: float
) -> dict[str, float]:
    """*Collective.* Accumulate over `micro_batches`, then step each model. Returns numbers of this rank's part.

    Losses are divided by what they sum over in the whole step on all ranks; since gradients are averaged over ranks,
    each rank's share is multiplied by their number.
    """
    total = sum((weights(one.action_mask, args.loss_agg_mode).sum() for one in micro_batches), torch.zeros(()))
    share = strategy.all_reduce(total, "sum") / strategy.world_size
    numbers: dict[str, float] = {}
    for one in micro_batches:
        on_device = one.to(strategy.device)
        for name, value in _actor(args, strategy, on_device, share, kl_coef).items():
            numbers[name] = numbers.get(name, 0.0) + value
    numbers["actor_grad_norm"] = strategy.optimizer_step(strategy.roles["actor"])
    if "critic" in strategy.roles:
        numbers["value_loss"] = sum(_critic(args, strategy, one.to(strategy.device), share) for one in micro_batches)
        numbers["critic_grad_norm"] = strategy.optimizer_step(strategy.roles["critic"])
    return numbers


def _actor(
    args: Arguments, strategy: Strategy, one: Experience, share: torch.Tensor, kl_coef: float
) -> dict[str, float]:
    role = strategy.roles["actor"]

    def mean(values: torch.Tensor) -> torch.Tensor:
        return aggregate(values, one.action_mask, args.loss_agg_mode, share)

    log_probs, entropy = token_log_probs(
        role.model, one.sequences, one.attention_mask, strategy.scoring, entropy=args.entropy_coef > 0
    )
    surrogate, clipped = policy_loss(log_probs, one.log_probs, one.advantages, args.eps_clip)
    policy = loss = mean(surrogate)
    if args.use_kl_loss:
        loss = loss + kl_coef * mean(estimate_kl(log_probs, one.reference_log_probs, args.kl_estimator))
    if entropy is not None:
        loss = loss - args.entropy_coef * mean(entropy)
    strategy.backward(loss, role)
    return {"policy_loss": policy.item(), "clip_fraction": mean(clipped.float()).item()}


def _critic(args: Arguments, strategy: Strategy, one: Experience, share: torch.Tensor) -> float:
    role = strategy.roles["critic"]
    values = token_values(role.model, one.sequences, one.attention_mask, strategy.scoring)
    each = value_loss(values, one.values, one.returns, args.value_clip)
    loss = aggregate(each, one.action_mask, args.loss_agg_mode, share)
    strategy.backward(loss, role)
    return loss.item()
