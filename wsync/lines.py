"""The senders of one trainer rank, and the engines that each of them serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from wsync.background import Background
from wsync.config import SyncConfig
from wsync.deadline import Deadline
from wsync.plan import Plan
from wsync.protocols import Engine, Sender
from wsync.topology import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One sender with every worker connected to it."""

    transport: str
    sender: Sender
    engines: tuple[Engine, ...]

    @property
    def intact(self) -> bool:
        """Whether no other session has attached one of the engines to itself meanwhile."""
        address = self.sender.ticket().address
        return all(engine.attachment == address for engine in self.engines)


def open_lines(
    engines: Sequence[Engine], choices: Sequence[Choice], plan: Plan, config: SyncConfig, generation: int
) -> list[Line]:
    """One sender for each transport among `choices`, with every engine's workers attached.

    Raises what an engine's `attach` or the transport raises; then nothing is left open.
    """
    lines: list[Line] = []
    plan = plan.without_owners()
    deadline = Deadline.after(config.timeout_s)
    try:
        for name in dict.fromkeys(choice.transport.name for choice in choices):
            served = [
                (engine, choice)
                for engine, choice in zip(engines, choices, strict=True)
                if choice.transport.name == name
            ]
            lines.append(_open_line([e for e, _ in served], [c for _, c in served], plan, config, generation, deadline))
    except BaseException:
        for line in lines:
            line.sender.close()
        raise
    return lines


def _open_line(
    engines: Sequence[Engine],
    choices: Sequence[Choice],
    plan: Plan,
    config: SyncConfig,
    generation: int,
    deadline: Deadline,
) -> Line:
    transport = choices[0].transport
    counts = [len(choice.topology.receivers) for choice in choices]
    sender = transport.sender(
        slot_bytes=plan.capacity,
        num_slots=min(config.num_slots, len(plan.buckets)) or 1,
        receivers=sum(counts),
        generation=generation,
    )
    try:
        ticket = sender.ticket()
        attaching = []
        first_index = 0
        for engine, count in zip(engines, counts, strict=True):
            attach = partial(engine.attach, plan, ticket, first_index, deadline)
            attaching.append(Background(f"{engine.name} to attach", attach))
            first_index += count
        accepting = Background("workers to connect", lambda: sender.accept(deadline))
        for call in attaching:
            call.result(deadline)
        accepting.result(deadline)
    except BaseException:
        sender.close()
        raise
    return Line(transport=transport.name, sender=sender, engines=tuple(engines))
