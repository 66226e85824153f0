"""The loop, and when it syncs."""

from integrations.ppo.trainer.base import Trainer
from integrations.ppo.trainer.registry import get_trainer_cls, register_trainer
from integrations.ppo.trainer.sync import SyncTrainer

__all__ = ["SyncTrainer", "Trainer", "get_trainer_cls", "register_trainer"]
