"""A model with what trains it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """Actor, critic or reference, prepared by a strategy."""

    name: str
    model: Any
    """What is called, and what `wsync.sync` takes: a module that is sharded, or a DeepSpeed engine."""

    optimizer: Any = None
    """None for a frozen model."""

    scheduler: Any = None
