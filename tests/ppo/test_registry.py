"""Trainers by name, and the nine hooks."""

import pytest

from integrations.ppo.errors import ConflictError
from integrations.ppo.trainer import SyncTrainer, Trainer, get_trainer_cls, register_trainer

HOOKS = {
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_validate_begin",
    "on_validate_end",
    "on_step_begin",
    "on_step_end",
    "on_sample_begin",
    "on_sample_end",
}


def test_sync_is_registered() -> None:
    assert get_trainer_cls("sync") is SyncTrainer


def test_what_cannot_be_registered() -> None:
    with pytest.raises(TypeError, match="no subclass of Trainer"):
        register_trainer("other")(int)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="SyncTrainer"):
        register_trainer("sync")(SyncTrainer)
    with pytest.raises(ConflictError, match=r"no trainer 'other'; there are .*sync"):
        get_trainer_cls("other")


def test_nine_hooks_of_which_two_are_abstract() -> None:
    assert {name for name in dir(Trainer) if name.startswith("on_")} == HOOKS
    assert Trainer.__abstractmethods__ == {"on_step_end", "on_sample_end"}
