"""What a session agreed on at connect, in words."""

from collections.abc import Mapping, Sequence

from wsync.errors import first_five
from wsync.group import Group
from wsync.handshake import Agreement
from wsync.protocols import Engine


def explain(agreement: Agreement, engines: Sequence[Engine], group: Group) -> str:
    """Plan, transport and why not the others, how tensors are loaded.

    Args:
        agreement: of all ranks.
        engines: of this rank.
        group: the ranks.
    """
    plan = agreement.plan
    text = [
        f"{len(plan.specs)} tensors, {plan.nbytes} bytes, in {len(plan.buckets)} bucket(s) "
        f"of at most {plan.bucket_bytes} bytes",
        _way(agreement),
        f"rank {group.rank} of {group.world_size}; {_senders(agreement)}",
        *_staging(agreement),
        *(f"engine: {name}" for name in agreement.engines),
    ]
    for engine, choice in zip(engines, agreement.choices, strict=bool(agreement.choices)):
        text.append(f"{engine.name}: {choice.explain()}")
    for manifest in agreement.manifests:
        text.append(f"worker: {manifest.replayed} tensors copied by plan ({manifest.verified})")
        text += _through_loader(manifest.through_loader)
    if agreement.left_out:
        text.append(f"not wanted by any engine: {first_five(agreement.left_out)}")
    return "\n".join(text)


def _senders(agreement: Agreement) -> str:
    turns = agreement.plan.turns
    return f"senders, in turn: ranks {list(turns)}" if turns else f"senders: ranks {list(agreement.senders)}"


def _way(agreement: Agreement) -> str:
    plan = agreement.plan
    if plan.pulled is not None:
        rest = f"; the other {sent} in buckets" if (sent := len(plan.specs) - len(plan.pulled.tensors)) else ""
        return f"pulled: {len(plan.pulled.tensors)} of them, by every worker from the ranks{rest}"
    why = agreement.buckets_because
    return f"in buckets, because {why}" if why else "read where the trainer has it"


def _staging(agreement: Agreement) -> list[str]:
    casts = agreement.staging.casts
    if not casts.wanted_nbytes:
        return []
    rest = "" if casts.nbytes == casts.wanted_nbytes else f" of {casts.wanted_nbytes}, as staging_bytes allows"
    return [f"cast here before workers read it over a link: {casts.nbytes} bytes{rest}"]


def _through_loader(reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason, with the tensors that have it."""
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    return [
        f"  {len(those)} tensor(s) through the engine's own loader ({first_five(those)}): {why}"
        for why, those in names.items()
    ]
