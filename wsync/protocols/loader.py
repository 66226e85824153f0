"""The contract of an engine's worker: its parameters, and its own way to load them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from wsync.regions import Region
from wsync.topology import Endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one engine worker said of the tensors that it was offered, from a dry run of its own loader."""

    dtypes: Mapping[str, torch.dtype]
    """Source name -> dtype of the parameter that it is written to. Names that the worker left out are absent."""

    uses: Mapping[str, tuple[Region, ...]]
    """Source name -> parts of it that this worker reads. Joined over workers they must cover the source."""

    problems: tuple[str, ...]
    """One sentence each: unknown name, wrong shape, uncovered part of a parameter, refused dtype."""

    replayed: int
    """Tensors that the load plan copies directly."""

    through_loader: Mapping[str, str]
    """Source name -> why it goes through the engine's own loader at every sync."""

    verified: str
    """How the plan was checked against the launch weights, or why it could not be."""

    endpoint: Endpoint
    """Where the worker's weights are."""


class Loader(Protocol):
    """The engine side of the data path, inside one worker. Holds no strong reference to the model between calls."""

    engine: str
    """Name and version of the engine, for messages."""

    whole: bool
    """Whether a sync replaces all weights that the engine generates with. That of an adapter does not: the base weights
    must be there and in order."""

    def endpoint(self) -> Endpoint:
        """Where this worker's weights are."""
        ...

    def targets(self) -> Mapping[str, torch.Tensor]:
        """Live parameters and buffers by the engine's own names, looked up afresh. The load plan writes only these."""
        ...

    def required(self) -> Sequence[str]:
        """Names in `targets()` that a full sync must cover."""
        ...

    def accepts(self, name: str) -> bool:
        """Whether an optional tensor (a non-persistent buffer) of this source name is wanted."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The engine's own loader, in place. Called with meta tensors in the dry run, with real ones in a sync.

        In a sync it is called at most once, with a lazy iterable of tensors that are the callee's own, none of them a
        view of a slot: it may edit and keep them without a copy.
        """
        ...

    def launch_weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """The checkpoint that the engine was started with, streamed; None if it started from none (dummy weights)."""
        ...

    def begin(self) -> None:
        """Before the first byte of an attempt. What it changes, `finish` or `rollback` puts right."""
        ...

    def finish(self) -> None:
        """The engine's post-load processing, once. Waits for devices without `targets`. Raises on any leftover."""
        ...

    def rollback(self) -> None:
        """After a failed attempt: leave the model fit to take a new full sync. Weights may be a mix; worker is torn.

        Waits as `finish` does.
        """
        ...
