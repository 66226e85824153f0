"""Rewards by a sequence classifier with one label, as transformers has them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from integrations.ppo.experience import Rollout
from integrations.ppo.strategy.base import Strategy
from integrations.ppo.strategy.roles import Role


class ModelReward:
    """A frozen model that is on the device for as long as it judges. See `RewardSource`; every method is collective."""

    def __init__(self, strategy: Strategy, folder: str, name: str, batch_size: int) -> None:
        """Shard the checkpoint in `folder`. `name` is that of the role, `batch_size` of a rank's forward."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._strategy = strategy
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
        self._pad: int | None = model.config.pad_token_id
        """What transformers finds the last token by. A model without one judges answers one by one."""
        self._batch_size = 1 if self._pad is None else batch_size
        self._role: Role = strategy.freeze(name, model)

    @torch.no_grad()
    def __call__(self, rollouts: Sequence[Rollout]) -> torch.Tensor:
        """See `RewardSource`. What is judged is prompt and response, tokenized again by the model's own tokenizer."""
        batches = [
            self._tokenized(rollouts[first : first + self._batch_size])
            for first in range(0, len(rollouts), self._batch_size)
        ]
        asked = self._strategy.evened(batches, (torch.ones(1, 1).long(), torch.ones(1, 1).bool()))
        device = self._strategy.device
        with self._strategy.loaded(self._role):
            said = [self._role.model(input_ids=ids.to(device), attention_mask=m.to(device)).logits for ids, m in asked]
        return torch.cat([torch.zeros(0), *(logits[:, 0].float().cpu() for logits in said[: len(batches)])])

    def _tokenized(self, rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids, attention mask), padded on the right."""
        rows = [torch.tensor(self._tokenizer(one.prompt + one.response).input_ids) for one in rollouts]
        masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
        pad = self._pad or 0
        return pad_sequence(rows, batch_first=True, padding_value=pad), pad_sequence(masks, batch_first=True)
