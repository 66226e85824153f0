"""The trainer's side of a session that pulls: what all ranks have, and what the workers were told."""

from collections.abc import Sequence
from typing import cast

import torch

from wsync.deadline import Deadline
from wsync.group import Group
from wsync.plan import Bucket
from wsync.protocols import Engine
from wsync.protocols.pull import ExportingProducer, PullingEngine
from wsync.pull.exports import Export, export


class Ranks:
    """Where the parts of one bucket lie on every rank."""

    def __init__(self, producer: ExportingProducer, bucket: Bucket, device: torch.device, group: Group) -> None:
        self._producer, self._bucket, self._device, self._group = producer, bucket, device, group
        self._known: dict[int, Export] = {}
        self._told = False

    def look(self, deadline: Deadline) -> None:
        """*Collective.* Look this rank's memory up; ranks hear of each other what is new."""
        rank = self._group.rank
        mine = export(rank, self._device, self._producer.shares(self._bucket))
        new = None if mine == self._known.get(rank) else mine
        replies = cast("Sequence[Export | None]", self._group.gather("export", lambda: new, deadline))
        for number, reply in enumerate(replies):
            if reply is not None:
                self._known[number] = reply
                self._told = False

    def tell(self, engines: Sequence[Engine], deadline: Deadline) -> None:
        """Let the workers know, unless they do."""
        if not self._told:
            for engine in engines:
                cast("PullingEngine", engine).take_exports(list(self._known.values()), deadline)
            self._told = True

    def forget(self) -> None:
        """The workers are others, or have lost what they were told."""
        self._told = False
