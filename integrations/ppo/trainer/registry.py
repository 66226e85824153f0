"""Trainers by name."""

from collections.abc import Callable

from integrations.ppo.errors import ConflictError
from integrations.ppo.trainer.base import Trainer

_trainers: dict[str, type[Trainer]] = {}


def register_trainer(name: str) -> Callable[[type[Trainer]], type[Trainer]]:
    """Class decorator. Raises `TypeError` for what is no `Trainer`, `ValueError` for a name that is taken."""

    def register(cls: type[Trainer]) -> type[Trainer]:
        if not (isinstance(cls, type) and issubclass(cls, Trainer)):
            raise TypeError(f"{cls!r} is no subclass of Trainer")
        if name in _trainers:
            raise ValueError(f"the name {name!r} belongs to {_trainers[name].__name__}")
        _trainers[name] = cls
        return cls

    return register


def get_trainer_cls(name: str) -> type[Trainer]:
    """The trainer of that name. Raises `ConflictError`, which lists the others."""
    if name not in _trainers:
        raise ConflictError(f"there is no trainer {name!r}; there are {', '.join(sorted(_trainers))}")
    return _trainers[name]
