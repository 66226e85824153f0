"""Generation and training take turns: the engine has the newest weights whenever it generates."""

from integrations.ppo.trainer.base import Trainer
from integrations.ppo.trainer.registry import register_trainer


@register_trainer("sync")
class SyncTrainer(Trainer):
    """Sync after each step, sleep after each sampling."""

    def on_step_end(self) -> None:
        """Bring the engine to the actor's new weights."""
        self.report = self.strategy.update_engine_weights(self.strategy.roles["actor"].model)

    def on_sample_end(self) -> None:
        """Make room for scoring and training."""
        self.strategy.maybe_sleep_inference_engine()
