"""Connect: whether workers can read the ranks' memory, and which tensors they will pull."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import cast

from wsync.config import SyncConfig
from wsync.deadline import Deadline
from wsync.errors import TransportError, UnsupportedError, first_five
from wsync.group import Group
from wsync.plan import Bucket, Plan, TensorSpec
from wsync.protocols import Engine, Manifest, Producer
from wsync.protocols.pull import ExportingProducer, PullingEngine
from wsync.pull.exports import Export, Exporter, Probe, Probed
from wsync.pull.staging import Staging, plan_casts


def agree_to_pull(
    producer: Producer,
    engines: Sequence[Engine],
    held: Sequence[TensorSpec],
    wanted: Sequence[TensorSpec],
    manifests: Sequence[Manifest],
    senders: Sequence[int],
    group: Group,
    config: SyncConfig,
) -> tuple[Plan, Staging] | str:
    """*Collective.* A plan of which as much as possible is pulled; the producer has taken it then.

    Args:
        held: in the trainer's dtypes.
        wanted: in wire dtypes.

    Returns:
        The plan, and this rank's memory for what it casts before it crosses a link; or the reason on every rank: some
        worker cannot read some rank, or nothing can be pulled.
    """
    patience = Deadline.beyond(config.timeout_s)
    if config.verify is not None:
        return "verify compares what arrives in buckets"
    probed: list[Probed] = []

    def probe() -> Probe | str:
        try:
            probed.append(Probed(group.rank, producer.device))
        except (TransportError, UnsupportedError) as error:  # the driver forbids it, or its package is not there
            return str(error)
        return probed[0].probe

    probes = cast("Sequence[Probe | str]", group.gather("probe", probe, patience))
    reasons = [f"trainer rank {rank}: {answer}" for rank, answer in enumerate(probes) if isinstance(answer, str)]
    if not reasons:
        answered = cast("Sequence[Probe]", probes)
        refusals = group.gather("try to pull", lambda: _refused(producer, engines, answered, config), patience)
        reasons = [str(reason) for reason in refusals if reason]
    if reasons:
        return reasons[0]
    dtypes = {spec.name: spec.dtype for spec in held}
    fit = {spec.name for spec in wanted if _fits(spec, dtypes, manifests)}
    exporting = cast("ExportingProducer", producer)
    hidden = group.gather("exposed", lambda: [name for name in sorted(fit) if not exporting.exposes(name)], patience)
    names = fit.difference(*cast("Sequence[Sequence[str]]", hidden))
    plan = Plan.pack(wanted, config.bucket_bytes, names)
    if plan.pulled is None:
        some = first_five([spec.name for spec in wanted])
        return f"none of {some} lies in the memory of a rank as an engine's worker can copy it"
    group.local("prepare", lambda: producer.prepare(plan, senders, group), patience)
    exports = _try_to_export(exporting, plan.pulled, group, patience)
    if isinstance(exports, str):
        return exports
    planning = partial(plan_casts, plan.pulled, exports, group.rank, manifests, config.staging_bytes)
    return plan, Staging(group.local("plan casts", planning, patience), producer.device)


def _try_to_export(
    producer: ExportingProducer, bucket: Bucket, group: Group, patience: Deadline
) -> Sequence[Export] | str:
    """*Collective.* What every rank exports now, or why the memory of some rank cannot be exported."""
    mine: list[Export | str] = []

    def export() -> Export | str:
        try:
            mine.append(Exporter(group.rank, producer.device).export(producer.shares(bucket)))
        except TransportError as error:
            mine.append(f"trainer rank {group.rank}: {error}")
        return mine[0]

    try:
        group.local("open", producer.open, patience)
        answers = cast("Sequence[Export | str]", group.gather("try to export", export, patience))
    finally:
        producer.close()
    reasons = [answer for answer in answers if isinstance(answer, str)]
    if reasons:
        return reasons[0]
    # Its own is the very object: its parts are those that the producer shows again.
    exports = [*answers[: group.rank], *mine, *answers[group.rank + 1 :]]
    return cast("Sequence[Export]", exports)


def _refused(producer: Producer, engines: Sequence[Engine], probes: Sequence[Probe], config: SyncConfig) -> str:
    """Why this rank, or a worker of one of its engines, cannot take part; "" if all can."""
    if not isinstance(producer, ExportingProducer):
        return f"a {type(producer).__name__} does not say where its tensors lie"
    for engine in engines:
        if not isinstance(engine, PullingEngine):
            return f"{engine.name} is reached in a way that does not pass on where weights lie"
        for worker, reason in enumerate(engine.probe(probes, Deadline.after(config.timeout_s))):
            if reason:
                return f"worker {worker} of {engine.name}: {reason}"
    return ""


def _fits(spec: TensorSpec, held: Mapping[str, object], manifests: Sequence[Manifest]) -> bool:
    """Whether plain copies bring it to every worker, rounded once."""
    declared = {manifest.dtypes[spec.name] for manifest in manifests if spec.name in manifest.dtypes}
    once = held[spec.name] == spec.dtype or declared <= {spec.dtype}
    return once and not any(spec.name in manifest.through_loader for manifest in manifests)
