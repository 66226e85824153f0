"""Models sharded by `fully_shard`, optimizers of PyTorch, checkpoints of torch.distributed.checkpoint."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from integrations.ppo.arguments import Arguments
from integrations.ppo.strategy.base import Strategy
from integrations.ppo.strategy.master_weights import to_bfloat16
from integrations.ppo.strategy.optimizers import adamw, scheduler
from integrations.ppo.strategy.roles import Role, role_of


class FSDPV2Strategy(Strategy):
    """See `Strategy`."""

    def __init__(self, args: Arguments) -> None:
        """See `Strategy`."""
        super().__init__(args)
        self._accumulated: Counter[str] = Counter()

    def prepare(self, name: str, model: Any, learning_rate: float) -> Role:
        """See `Strategy`."""
        if self.args.use_mp_opt:
            to_bfloat16(model)
        sharded = self.prepare_model(model, is_training=True)
        optimizer = adamw(self.args, sharded, learning_rate)
        return self._add(Role(name=name, model=sharded, optimizer=optimizer, scheduler=scheduler(self.args, optimizer)))

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any) -> None:
        """See `Strategy`."""
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str = "model") -> float | None:
        """See `Strategy`."""
        whose = role_of(self.roles, optimizer).name
        self._accumulated[whose] += 1
        if self._accumulated[whose] < self.micro_batches:
            return None
        self._accumulated[whose] = 0
        norm = nn.utils.clip_grad_norm_(model.parameters(), self.args.max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def save_ckpt(self, folder: Path) -> None:
        """See `Strategy`."""
        save(self._state(), checkpoint_id=folder)

    def load_ckpt(self, folder: Path) -> None:
        """See `Strategy`."""
        state = self._state()
        load(state, checkpoint_id=folder)
        for role in self.trained:
            saved = state[role.name]
            set_state_dict(
                role.model, role.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
            )
            role.scheduler.load_state_dict(saved["scheduler"])

    def _state(self) -> dict[str, Any]:
        found = {}
        for role in self.trained:
            model, optimizer = get_state_dict(role.model, role.optimizer)
            found[role.name] = {"model": model, "optimizer": optimizer, "scheduler": role.scheduler.state_dict()}
        return found
