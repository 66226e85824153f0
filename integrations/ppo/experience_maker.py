"""From prompts to experience: generate, score by each role in turn, reward, advantages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from integrations.ppo.advantages import gae, group_normalised, moments, token_rewards, whiten
from integrations.ppo.arguments import Arguments
from integrations.ppo.engines.base import SamplingParams
from integrations.ppo.experience import Experience, Rollout, padded
from integrations.ppo.kl import KLController, estimate_kl
from integrations.ppo.log_probs import evaluating, token_log_probs, token_values
from integrations.ppo.prompts import Prompt
from integrations.ppo.rewards.engine import RewardComputationEngine
from integrations.ppo.strategy.base import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What the roles say about one micro-batch, in host memory; see `Experience`."""

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    action_mask: torch.Tensor
    log_probs: torch.Tensor
    engine_log_probs: torch.Tensor
    reference_log_probs: torch.Tensor
    values: torch.Tensor


class ExperienceMaker:
    """One rank's. Every method is collective."""

    def __init__(
        self, args: Arguments, strategy: Strategy, tokenizer: Any, rewards: RewardComputationEngine, kl: KLController
    ) -> None:
        self._args, self._strategy, self.tokenizer = args, strategy, tokenizer
        self.rewards, self._kl = rewards, kl

    def generate(self, prompts: Sequence[Prompt], *, seed: int, temperature: float, samples: int) -> list[Rollout]:
        """`samples` answers to each prompt, next to each other. The engine stays awake.

        With `--sp_size` the rollouts of all ranks that share their sequences, the same on each of them.
        """
        asked = [prompt for prompt in prompts for _ in range(samples)]
        params = SamplingParams(
            max_new_tokens=self._args.generate_max_len,
            temperature=temperature,
            seed=seed,
            stop_token_id=self.tokenizer.eos_token_id,
        )
        texts = [prompt.text for prompt in asked]
        answers = self._strategy.gather_and_generate(params, all_prompts=texts, sleep_engine=False)
        mine = [
            Rollout(
                prompt=prompt.text,
                label=prompt.label,
                prompt_ids=answer.prompt_token_ids,
                response_ids=answer.output_token_ids,
                response=self.tokenizer.decode(answer.output_token_ids, skip_special_tokens=True),
                engine_log_probs=answer.log_probs,
            )
            for prompt, answer in zip(asked, answers, strict=True)
        ]
        return self._strategy.shared(mine)

    def make(self, rollouts: Sequence[Rollout], *, grouped: bool = True) -> tuple[list[Experience], dict[str, float]]:
        """Experience in micro-batches, and numbers over all ranks. Ranks may have different numbers of rollouts.

        `grouped`: whether neighbours are answers to one prompt, `n_samples_per_prompt` of them. Only such have
        advantages with `group_norm`; others have 0.
        """
        scored = self._score(rollouts)
        scores = self.rewards(rollouts)
        sequence_kl = [self._penalty(one).sum(1) for one in scored]
        experience = self._advantages(scored, scores, grouped=grouped)
        return experience, self._numbers(rollouts, scored, scores, torch.cat([*sequence_kl, torch.zeros(0)]))

    @torch.no_grad()
    def _score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Actor, then reference, then critic."""
        strategy, size = self._strategy, self._args.micro_rollout_batch_size
        batches = [
            padded([one.prompt_ids for one in part], [one.response_ids for one in part])
            for part in (rollouts[first : first + size] for first in range(0, len(rollouts), size))
        ]
        one_token = torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2).bool(), torch.ones(1, 1).bool()
        asked = strategy.evened(batches, one_token)
        strategy.enter("score")
        said = [self._log_probs("actor", *batch) for batch in asked]
        reference, values = said, [torch.zeros_like(one) for one in said]
        if "reference" in strategy.roles:
            with strategy.loaded(strategy.roles["reference"]):
                reference = [self._log_probs("reference", *batch) for batch in asked]
        if "critic" in strategy.roles:
            values = [self._values(*batch) for batch in asked]
        return [
            Scored(
                sequences=sequences,
                attention_mask=attention_mask,
                action_mask=action_mask,
                log_probs=said[index],
                engine_log_probs=_of_engine(rollouts[index * size : (index + 1) * size], action_mask),
                reference_log_probs=reference[index],
                values=values[index],
            )
            for index, (sequences, attention_mask, action_mask) in enumerate(batches)
        ]

    def _log_probs(self, role: str, sequences: torch.Tensor, mask: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        model, device = self._strategy.roles[role].model, self._strategy.device
        with evaluating(model):
            said, _ = token_log_probs(model, sequences.to(device), mask.to(device), self._strategy.scoring)
        return torch.where(actions, said.cpu(), 0)

    def _values(self, sequences: torch.Tensor, mask: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        model, device = self._strategy.roles["critic"].model, self._strategy.device
        with evaluating(model):
            values = token_values(model, sequences.to(device), mask.to(device), self._strategy.scoring)
        return torch.where(actions, values.cpu(), 0)

    def _penalty(self, one: Scored) -> torch.Tensor:
        """KL of each token, not weighed."""
        return estimate_kl(one.log_probs, one.reference_log_probs, self._args.kl_estimator)

    def _advantages(self, scored: Sequence[Scored], scores: torch.Tensor, *, grouped: bool) -> list[Experience]:
        args = self._args
        weight = 0.0 if args.use_kl_loss else self._kl.value
        penalties = [weight * self._penalty(one) for one in scored]
        parts = torch.split(scores, [len(one.sequences) for one in scored])
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        if args.advantage_estimator == "gae":
            for one, part, penalty in zip(scored, parts, penalties, strict=True):
                rewards = token_rewards(part, penalty, one.action_mask)
                found.append(gae(rewards, one.values, one.action_mask, gamma=args.gamma, lambd=args.lambd))
        else:
            totals = scores - torch.cat([*(penalty.sum(1) for penalty in penalties), torch.zeros(0)])
            each = group_normalised(totals, args.n_samples_per_prompt) if grouped else torch.zeros_like(totals)
            split = torch.split(each, [len(one.sequences) for one in scored])
            for one, part in zip(scored, split, strict=True):
                advantages = part[:, None] * one.action_mask
                found.append((advantages, torch.zeros_like(advantages)))
        made = [
            Experience(
                **{name: getattr(one, name) for name in Scored.__slots__}, advantages=advantages, returns=returns
            )
            for one, (advantages, returns) in zip(scored, found, strict=True)
        ]
        return self._whitened(made) if args.whiten_advantages else made

    def _whitened(self, made: list[Experience]) -> list[Experience]:
        empty = torch.zeros(3, dtype=torch.float64)
        total = sum((moments(one.advantages, one.action_mask) for one in made), empty)
        total = self._strategy.all_reduce(total, "sum").cpu()
        return [replace(one, advantages=whiten(one.advantages, one.action_mask, total)) for one in made]

    def _numbers(
        self, rollouts: Sequence[Rollout], scored: Sequence[Scored], scores: torch.Tensor, kl: torch.Tensor
    ) -> dict[str, float]:
        """Means over all sequences of all ranks, and the largest difference between engine and actor."""
        lengths = torch.tensor([float(len(one.response_ids)) for one in rollouts])
        mine = {"reward": scores.sum(), "kl": kl.sum(), "response_length": lengths.sum()}
        sums = self._strategy.all_reduce(
            {"count": float(len(rollouts)), **{n: float(t) for n, t in mine.items()}}, "sum"
        )
        numbers = {name: sums[name] / sums["count"] for name in mine}
        gaps = [(one.engine_log_probs - one.log_probs).abs().max() for one in scored]
        gap = torch.stack([torch.zeros(()), *gaps]).nan_to_num(nan=torch.inf).max()  # a maximum over ranks may drop NaN
        return {**numbers, **self._strategy.all_reduce({"engine_gap": float(gap)}, "max")}


def _of_engine(rollouts: Sequence[Rollout], actions: torch.Tensor) -> torch.Tensor:
    """What the engine said about the tokens of one micro-batch, 0 elsewhere."""
    found = torch.zeros(actions.shape)
    found[actions] = torch.tensor([number for one in rollouts for number in one.engine_log_probs])
    return found
