"""The trainer with a mode that never syncs: `-m tests.ppo.no_sync ... --trainer no-sync`."""

from integrations.ppo.train import main
from integrations.ppo.trainer import Trainer, register_trainer


@register_trainer("no-sync")
class NoSyncTrainer(Trainer):
    """The control: all as in `sync`, and the engine keeps its first weights."""

    def on_step_end(self) -> None:
        """Nothing."""

    def on_sample_end(self) -> None:
        """See `SyncTrainer`."""
        self.strategy.maybe_sleep_inference_engine()


if __name__ == "__main__":
    main()
