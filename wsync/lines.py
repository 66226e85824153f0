"""The senders of one trainer rank, and the engines that each of them serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from wsync.background import Background
from wsync.config import SyncConfig
from wsync.deadline import Deadline
from wsync.errors import EngineStateError, first_five
from wsync.group import Group
from wsync.plan import Plan
from wsync.protocols import Engine, Sender, Ticket
from wsync.topology import Choice
from wsync.transports.nothing import NAME, NoSender
from wsync.turns import Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One sender with every worker connected to it."""

    transport: str
    sender: Sender
    engines: tuple[Engine, ...]
    by_reference: bool
    """Whether what lies whole in this process is handed over, and takes no slot."""

    @property
    def intact(self) -> bool:
        """Whether no other session has attached one of the engines to itself meanwhile."""
        address = self.sender.ticket().address
        return all(engine.attachment == address for engine in self.engines)


def slots_bytes(choices: Sequence[Choice], plan: Plan, config: SyncConfig, group: Group) -> int:
    """Bytes of slots that `open_lines`, or `open_turns`, allocates on this rank, at most."""
    if plan.in_place:
        return 0
    if plan.turns:
        return plan.capacity * min(config.num_slots, len(plan.sent_by(group.rank).buckets))
    transports = {choice.transport.name: choice.transport for choice in choices}
    rings = sum(not (group.world_size == 1 and transport.by_reference) for transport in transports.values())
    return rings * plan.capacity * min(config.num_slots, len(plan.buckets))


def check_intact(lines: Sequence[Line]) -> None:
    """Raise `EngineStateError` if another session has attached engines of `lines` to itself meanwhile."""
    lost = [engine.name for line in lines if not line.intact for engine in line.engines]
    if lost:
        raise EngineStateError(f"{first_five(lost)}: another session took the engine since this one began; sync again")


def open_lines(
    engines: Sequence[Engine],
    choices: Sequence[Choice],
    plan: Plan,
    config: SyncConfig,
    generation: int,
    device: torch.device,
) -> list[Line]:
    """One sender for each transport among `choices`, with every engine's workers attached. Weights are on `device`.

    A plan of which nothing travels needs no transport.

    Raises what an engine's `attach` or the transport raises; then nothing is left open.
    """
    lines: list[Line] = []
    plan = plan.without_owners()
    deadline = Deadline.after(config.timeout_s)
    if not plan.sent.buckets and engines:
        line = Line(transport=NAME, sender=NoSender(generation), engines=tuple(engines), by_reference=False)
        _meet(line, [0] * len(engines), plan, deadline)
        return [line]
    try:
        for name in dict.fromkeys(choice.transport.name for choice in choices):
            served = [pair for pair in zip(engines, choices, strict=True) if pair[1].transport.name == name]
            receivers = [len(choice.topology.receivers) for _, choice in served]
            transport = served[0][1].transport
            sender = transport.sender(
                slot_bytes=plan.capacity,
                num_slots=0 if plan.in_place else min(config.num_slots, len(plan.sent.buckets)),
                receivers=sum(receivers),
                generation=generation,
                device=device,
            )
            line = Line(
                transport=name,
                sender=sender,
                engines=tuple(engine for engine, _ in served),
                by_reference=sender.by_reference and (plan.in_place or transport.by_reference),
            )
            lines.append(line)
            _meet(line, receivers, plan, deadline)
    except BaseException:
        for line in lines:
            line.sender.close()
        raise
    return lines


def open_turns(
    engines: Sequence[Engine], turns: Turns, plan: Plan, config: SyncConfig, group: Group, device: torch.device
) -> list[Line]:
    """*Collective.* One sender on each rank that has a turn, with the workers of all of `engines` attached to each.

    Raises as `open_lines`, and `RankError` if that happened on another rank.
    """
    plan = plan.without_owners()
    lines: list[Line] = []

    def invite() -> Ticket | None:
        own = plan.sent_by(group.rank).buckets
        if not own:
            return None
        sender = turns.transport.sender(
            slot_bytes=plan.capacity,
            num_slots=min(config.num_slots, len(own)),
            receivers=sum(turns.receivers),
            generation=group.call,
            device=device,
        )
        lines.append(Line(transport=turns.transport.name, sender=sender, engines=tuple(engines), by_reference=False))
        return sender.ticket()

    patience = Deadline.beyond(config.timeout_s)
    try:
        invited = cast("Sequence[Ticket]", group.gather("invite", invite, patience))
        tickets, deadline = [invited[rank] for rank in plan.turns], Deadline.after(config.timeout_s)
        # Beside the round: a rank that only accepts must hear what becomes of the one that attaches.
        accepting = [Background("workers to connect", partial(line.sender.accept, deadline)) for line in lines]
        group.local("attach", lambda: _attach(engines, turns.receivers, plan, tickets, deadline), patience.restart())
        group.local("accept", lambda: [call.result(deadline) for call in accepting], patience.restart())
    except BaseException:
        for line in lines:
            line.sender.close()
        raise
    return lines


def _meet(line: Line, receivers: Sequence[int], plan: Plan, deadline: Deadline) -> None:
    """Connect the workers of every engine to the one sender of `line`."""
    accepting = Background("workers to connect", partial(line.sender.accept, deadline))
    _attach(line.engines, receivers, plan, [line.sender.ticket()], deadline)
    accepting.result(deadline)


def _attach(
    engines: Sequence[Engine], receivers: Sequence[int], plan: Plan, tickets: Sequence[Ticket], deadline: Deadline
) -> None:
    """Give the tickets to the workers of every engine of this rank; `receivers` says how many each has."""
    attaching = []
    first_index = 0
    for engine, count in zip(engines, receivers, strict=False):
        attach = partial(engine.attach, plan, tickets, first_index, deadline)
        attaching.append(Background(f"{engine.name} to attach", attach))
        first_index += count
    for call in attaching:
        call.result(deadline)
