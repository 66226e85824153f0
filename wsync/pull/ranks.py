"""The trainer's side of a session that pulls: what all ranks have, and what the workers were told."""

from collections.abc import Callable, Sequence
from typing import cast

from wsync.deadline import Deadline
from wsync.device_work import queued, wait_for
from wsync.group import Group
from wsync.lines import Line
from wsync.plan import Bucket
from wsync.protocols.pull import ExportingProducer, PullingEngine
from wsync.pull.exports import Export, Exporter
from wsync.pull.staging import Staging


class Ranks:
    """Where the parts of one bucket lie on every rank."""

    def __init__(self, producer: ExportingProducer, bucket: Bucket, staging: Staging, group: Group) -> None:
        self._producer, self._bucket, self._staging, self._group = producer, bucket, staging, group
        self._exporter = Exporter(group.rank, producer.device)
        self._known: dict[int, Export] = {}
        self._told = False

    def open(self, deadline: Deadline, meanwhile: Callable[[], None]) -> float:
        """*Collective.* Open the producer and look its memory up; ranks hear of each other what is new.

        What the trainer has queued on a device is done when this returns, and so are casts into the staging memory:
        workers do not see its streams. `meanwhile` is called while the device casts. Returns the seconds that the
        casts of this rank took.
        """
        rank, device = self._group.rank, self._producer.device
        devices = [device] if device.type == "cuda" else []
        mine: list[Export] = []

        def news() -> Export | None:
            self._producer.open()
            self._group.settle(deadline)  # hears of deaths, which the next wait does not
            wait_for(queued(devices), deadline)
            shares = self._staging.fill(self._producer.shares(self._bucket))
            casts = queued(devices)
            mine.append(self._exporter.export(shares))
            meanwhile()
            wait_for(casts, deadline)
            return None if mine[0] is self._known.get(rank) else mine[0]

        replies = cast("Sequence[Export | None]", self._group.gather("open", news, deadline))
        for number, reply in enumerate(replies):
            if reply is not None:
                self._known[number] = mine[0] if number == rank else reply
                self._told = False
        return self._staging.seconds

    def tell(self, lines: Sequence[Line], deadline: Deadline) -> float:
        """Let the workers know, unless they do. Returns the seconds that the slowest needed to map what is new."""
        if self._told:
            return 0.0
        exports = list(self._known.values())
        seconds = [
            cast("PullingEngine", engine).take_exports(exports, line.sender.ticket().address, deadline)
            for line in lines
            for engine in line.engines
        ]
        self._told = True
        return max(seconds, default=0.0)

    def forget(self) -> None:
        """*Collective.* The workers know nothing any more, nor do ranks of each other: some may have missed a round."""
        self._known.clear()
        self._told = False
