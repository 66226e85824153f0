"""Trainer ranks that send buckets of one engine in turn: who they are, and whether each of them can."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from wsync.config import SyncConfig
from wsync.deadline import Deadline
from wsync.errors import ConfigError, UnsupportedError
from wsync.group import Group
from wsync.protocols import Transport
from wsync.topology import Choice, Endpoint, Topology, local_endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What a rank must know to open a sender for the workers of an engine that another rank may own."""

    ranks: tuple[int, ...]
    """In the order of their turns; the owner is the first one."""

    transport: Transport
    """This rank's."""

    receivers: tuple[int, ...]
    """Workers of each of the owner's engines."""


def agree_on_turns(
    owners: Sequence[int],
    choices: Sequence[Choice],
    transports: Sequence[Transport],
    device: torch.device,
    group: Group,
    config: SyncConfig,
) -> Turns:
    """*Collective.* Who sends in turn, by the transport that the owner has chosen.

    Raises:
        ConfigError: several ranks own engines, or there are fewer ranks than senders.
        UnsupportedError: the transport has one sender only, or does not serve one of the ranks.
    """
    if len(owners) != 1 or config.senders > group.world_size:
        raise ConfigError(
            f"senders is {config.senders}, of {group.world_size} trainer rank(s), with engines on rank(s) "
            f"{list(owners)}: senders take turns for engines of one rank, and each of them is another rank"
        )
    [owner] = owners
    ranks = tuple((owner + turn) % group.world_size for turn in range(config.senders))

    def chosen() -> Mapping[str, object] | None:
        if group.rank != owner:
            return None
        names = {choice.transport.name for choice in choices}
        if len(names) > 1:
            raise UnsupportedError(f"senders take turns over one transport, and these engines need {sorted(names)}")
        return {"name": names.pop(), "workers": [list(choice.topology.receivers) for choice in choices]}

    patience = Deadline.beyond(config.timeout_s)
    answers = group.gather("choose senders", chosen, patience)
    answer = cast("Mapping[str, Any]", answers[owner])
    workers = cast("Sequence[Sequence[Endpoint]]", answer["workers"])
    everybody = tuple(one for those in workers for one in those)

    def mine() -> Transport:
        found = [one for one in transports if one.name == answer["name"]]
        if not found or not getattr(found[0], "in_turns", False):
            raise UnsupportedError(f"{answer['name']} has one sender; pass transport='gloo' or 'nccl' for turns")
        reason = found[0].refuse(Topology(sender=local_endpoint(device), receivers=everybody))
        if reason is not None and group.rank in ranks:
            raise UnsupportedError(f"trainer rank {group.rank} cannot send over {found[0].name}: {reason}")
        return found[0]

    transport = group.local("choose senders", mine, patience)
    return Turns(ranks=ranks, transport=transport, receivers=tuple(map(len, workers)))
