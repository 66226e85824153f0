"""Connect: whether workers can read the ranks' memory, and which tensors they will pull."""

from collections.abc import Mapping, Sequence
from typing import cast

from wsync.config import SyncConfig
from wsync.deadline import Deadline
from wsync.errors import TransportError, UnsupportedError, first_five
from wsync.group import Group
from wsync.plan import Bucket, TensorSpec
from wsync.protocols import Engine, Manifest, Producer
from wsync.protocols.pull import ExportingProducer, PullingEngine
from wsync.pull.exports import Exporter, Probe, Probed


def agree_on_pull(
    producer: Producer,
    engines: Sequence[Engine],
    held: Sequence[TensorSpec],
    wanted: Sequence[TensorSpec],
    manifests: Sequence[Manifest],
    group: Group,
    config: SyncConfig,
) -> frozenset[str]:
    """*Collective.* Names of the tensors that are pulled.

    Args:
        held: in the trainer's dtypes.
        wanted: in wire dtypes.

    Raises `UnsupportedError`, on every rank, if some worker cannot read some rank, or nothing can be pulled.
    """
    patience = Deadline.beyond(config.timeout_s)
    probed: list[Probed] = []

    def probe() -> Probe:
        probed.append(Probed(group.rank, producer.device))
        return probed[0].probe

    probes = cast("Sequence[Probe]", group.gather("probe", probe, patience))
    reasons = group.gather("try to pull", lambda: _refused(producer, engines, probes, config), patience)
    if any(reasons):
        raise UnsupportedError(f"weights cannot be pulled: {next(reason for reason in reasons if reason)}")
    dtypes = {spec.name: spec.dtype for spec in held}
    fit = {spec.name for spec in wanted if _fits(spec, dtypes, manifests)}
    exposing = cast("ExportingProducer", producer)
    hidden = group.gather("exposed", lambda: [name for name in sorted(fit) if not exposing.exposes(name)], patience)
    names = fit.difference(*cast("Sequence[Sequence[str]]", hidden))
    if not names:
        raise UnsupportedError(
            f"weights cannot be pulled: none of {first_five([spec.name for spec in wanted])} lies in the memory of a "
            f"rank as an engine's worker can copy it"
        )
    return frozenset(names)


def check_exports(producer: Producer, bucket: Bucket, group: Group, config: SyncConfig) -> None:
    """*Collective.* Raise `UnsupportedError`, on every rank, if the memory of some rank cannot be exported.

    Args:
        producer: has taken the plan.
        bucket: that is to be pulled.
    """
    patience = Deadline.beyond(config.timeout_s)
    exporting = cast("ExportingProducer", producer)
    try:
        group.local("open", producer.open, patience)
        reasons = group.gather("try to export", lambda: _not_exported(exporting, bucket, group.rank), patience)
    finally:
        producer.close()
    if any(reasons):
        raise UnsupportedError(f"weights cannot be pulled: {next(reason for reason in reasons if reason)}")


def _not_exported(producer: ExportingProducer, bucket: Bucket, rank: int) -> str:
    try:
        Exporter(rank, producer.device).export(producer.shares(bucket))
    except TransportError as error:
        return f"trainer rank {rank}: {error}"
    return ""


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
