"""A model with what trains it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from integrations.ppo.errors import ConflictError


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Actor, critic or reference, prepared by a strategy."""

    name: str
    model: Any
    """What is called, and what `wsync.sync` takes: a module that is sharded, or a DeepSpeed engine."""

    optimizer: Any = None
    """None for a frozen model."""

    scheduler: Any = None


def role_of(roles: Mapping[str, Role], part: object) -> Role:
    """The role whose model or optimizer `part` is. Raises `ConflictError` if there is none."""
    for role in roles.values():
        if part is role.model or part is role.optimizer:
            return role
    raise ConflictError(
        f"a {type(part).__name__} that was not prepared here; there are {', '.join(roles) or 'no roles'}"
    )
