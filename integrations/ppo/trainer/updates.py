"""One optimizer step of actor and critic."""

from collections.abc import Sequence
from itertools import chain

import torch

from integrations.ppo.arguments import Arguments
from integrations.ppo.experience import Experience
from integrations.ppo.kl import estimate_kl
from integrations.ppo.log_probs import token_log_probs, token_values
from integrations.ppo.losses import aggregate, importance, policy_loss, value_loss, weights
from integrations.ppo.strategy.base import Strategy
from integrations.ppo.strategy.roles import Role


def update(
    args: Arguments, strategy: Strategy, micro_batches: Sequence[Experience], kl_coef: float
) -> dict[str, float]:
    """*Collective.* One step of each model over `micro_batches`. Returns numbers of this rank's part.

    Losses are divided by what they sum over in the whole step on all ranks; since gradients are averaged over ranks,
    each rank's share is multiplied by their number.
    """
    total = sum((weights(one.action_mask, args.loss_agg_mode).sum() for one in micro_batches), torch.zeros(()))
    share = strategy.all_reduce(total, "sum") / strategy.world_size
    said = [_actor(args, strategy, one.to(strategy.device), share, kl_coef) for one in micro_batches]
    if "critic" in strategy.roles:
        said += [_critic(args, strategy, one.to(strategy.device), share) for one in micro_batches]
    numbers: dict[str, float] = {}
    for name, value in chain.from_iterable(one.items() for one in said):
        numbers[name] = numbers.get(name, 0.0) + value
    return numbers


def _step(strategy: Strategy, role: Role, loss: torch.Tensor) -> dict[str, float]:
    """The norm of the gradients, if this was the last micro-batch."""
    strategy.backward(loss, role.model, role.optimizer)
    norm = strategy.optimizer_step(role.optimizer, role.model, role.scheduler, name=role.name)
    return {} if norm is None else {f"{role.name}_grad_norm": norm}


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
    if args.importance_cap:
        surrogate = surrogate * importance(one.log_probs, one.engine_log_probs, args.importance_cap)
    policy = loss = mean(surrogate)
    if args.use_kl_loss:
        loss = loss + kl_coef * mean(estimate_kl(log_probs, one.reference_log_probs, args.kl_estimator))
    if entropy is not None:
        loss = loss - args.entropy_coef * mean(entropy)
    numbers = _step(strategy, role, loss)
    return {**numbers, "policy_loss": policy.item(), "clip_fraction": mean(clipped.float()).item()}


def _critic(args: Arguments, strategy: Strategy, one: Experience, share: torch.Tensor) -> dict[str, float]:
    role = strategy.roles["critic"]
    values = token_values(role.model, one.sequences, one.attention_mask, strategy.scoring)
    each = value_loss(values, one.values, one.returns, args.value_clip)
    loss = aggregate(each, one.action_mask, args.loss_agg_mode, share)
    return {**_step(strategy, role, loss), "value_loss": loss.item()}
