"""Connect: trainer ranks and engines compare what they have, and agree on one plan before a byte is moved."""

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, cast

import torch

from wsync.config import SyncConfig
from wsync.deadline import Deadline
from wsync.device_transfers import Introduction, compare, introduce
from wsync.digest import word_bytes
from wsync.errors import ConfigError, MismatchError, UnsupportedError, first_five
from wsync.group import Group
from wsync.plan import ALIGNMENT_BYTES, Plan, TensorSpec
from wsync.protocols import Engine, Manifest, Producer, ReferringTransport, Transport
from wsync.pull.agreement import agree_to_pull
from wsync.pull.staging import Staging
from wsync.regions import uncovered
from wsync.topology import Choice, Topology, choose, local_endpoint
from wsync.turns import Turns, agree_on_turns
from wsync.views import Views


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What every rank knows after connecting."""

    plan: Plan
    buckets_because: str
    """Why not all is read at once where the trainer has it; "" if it is."""

    senders: tuple[int, ...]
    """Trainer ranks that own engines, and so send."""

    engines: tuple[str, ...]
    """All engines of the session, "name on rank r", for people."""

    manifests: tuple[Manifest, ...]
    """One for each worker of all engines."""

    left_out: tuple[str, ...]
    """Optional tensors that no engine takes."""

    choices: tuple[Choice, ...]
    """The transport of each of this rank's engines. None at all if nothing travels."""

    turns: Turns | None
    """Who sends the buckets in turn; None if every rank sends all of them to the engines that it owns."""

    spread: frozenset[str]
    """Replicas whose workers belong to several engines, of one rank or of several."""

    staging: Staging
    """This rank's memory for what it casts before workers read it over a link."""

    token: str
    """The same on every rank, and in no other session."""


def connect_ranks(
    producer: Producer,
    engines: Sequence[Engine],
    transports: Sequence[Transport],
    group: Group,
    config: SyncConfig,
) -> Agreement:
    """Exchange metadata and manifests, check them, and make the plan.

    Raises:
        ConfigError: no rank owns an engine, or the ranks' configurations differ.
        MismatchError: ranks disagree among themselves, or an engine with them; the message names the first five.
        UnsupportedError: no transport serves one of this rank's engines.
        RankError: another rank failed here; the message carries its words.
    """
    settings = repr(replace(config, transport=getattr(config.transport, "name", config.transport)))

    def greeting() -> Mapping[str, object]:
        names = [engine.name for engine in engines]
        specs = producer.metadata()  # after it the device is known
        token, device = uuid.uuid4().hex, producer.device.type
        return {"settings": settings, "engines": names, "specs": specs, "token": token, "device": device}

    greetings = cast("Sequence[Mapping[str, Any]]", group.gather("connect", greeting, Deadline.after(config.timeout_s)))
    engines_by_rank = _check_greetings(greetings)
    devices = {str(greeting["device"]) for greeting in greetings}
    specs = merge_specs([greeting["specs"] for greeting in greetings])
    replicas, spread = _describe_all(specs, engines, group, config)
    try:
        wanted = negotiate(specs, replicas, config.dtype)
    except MismatchError as error:
        if config.lora != "adapter":
            raise
        raise MismatchError(
            f"{error}. These are the tensors of an adapter alone, for an engine with the same base weights that takes "
            f"such an adapter; lora='merged' suits every other engine"
        ) from error
    if config.verify == "digest":
        wanted = tuple(replace(spec, word_bytes=word_bytes(spec)) for spec in wanted)
    taken = {spec.name for spec in wanted}
    senders = tuple(rank for rank, names in enumerate(engines_by_rank) if names)
    patience = Deadline.beyond(config.timeout_s)
    manifests = [manifest for workers in replicas.values() for manifest in workers]

    pulling = partial(agree_to_pull, producer, engines, specs, wanted, manifests, senders, group, config)
    choosing = partial(_choose_all, producer, engines, transports, config)
    choices: Sequence[Choice] = ()
    turns: Turns | None = None
    staging = Staging()
    plan: Plan | None
    if config.path == "pull":
        pulled, buckets_because = pulling(), ""
        if isinstance(pulled, str):
            raise UnsupportedError(f"weights cannot be pulled: {pulled}")
        plan, staging = pulled
        if plan.sent.buckets:
            choices = group.local("choose a transport", choosing, patience)
    else:
        choices = group.local("choose a transport", choosing, patience)
        plan, buckets_because = agree_in_place(producer, wanted, choices, senders, group, config)
        if config.senders > 1:
            turns = agree_on_turns(senders, choices, transports, producer.device, group, config)
        elif plan is None and config.path == "auto" and config.transport == "auto" and devices == {"cuda"}:
            pulled = pulling()
            if isinstance(pulled, str):
                buckets_because = f"{buckets_because}, and cannot be pulled: {pulled}"
            else:
                (plan, staging), buckets_because = pulled, ""
        if plan is None:
            packed = Plan.pack(wanted, config.bucket_bytes)
            in_buckets = plan = packed if turns is None else packed.in_turns(turns.ranks)
            group.local("prepare", lambda: producer.prepare(in_buckets, senders, group), patience)
    if "cuda" in devices:
        _check_gathers(plan.sent, plan.turns or senders, producer.device, group, patience)
    return Agreement(
        plan=plan,
        buckets_because=buckets_because,
        senders=senders,
        engines=tuple(f"{name} on rank {rank}" for rank, names in enumerate(engines_by_rank) for name in names),
        manifests=tuple(manifests),
        left_out=tuple(spec.name for spec in specs if spec.name not in taken),
        choices=tuple(choices),
        turns=turns,
        spread=spread,
        staging=staging,
        token=greetings[0]["token"],
    )


def agree_in_place(
    producer: Producer,
    wanted: Sequence[TensorSpec],
    choices: Sequence[Choice],
    senders: Sequence[int],
    group: Group,
    config: SyncConfig,
) -> tuple[Plan | None, str]:
    """A plan of a single bucket if every engine reads all of it where it lies on a device.

    Then no slot bounds the buckets, and each would cost a launch.

    Returns:
        The plan, which the producer has taken, and "", or None and the reason.
    """
    patience = Deadline.beyond(config.timeout_s)
    reasons = group.gather("in place", lambda: _refuse_in_place(producer, choices, config), patience)
    if not any(reasons):
        plan = Plan.pack(wanted, sum(spec.nbytes + ALIGNMENT_BYTES for spec in wanted) + ALIGNMENT_BYTES)
        plan = replace(plan, in_place=True)
        group.local("prepare", lambda: producer.prepare(plan, senders, group), patience)
        try:
            group.local("open", producer.open, patience)
            reasons = group.gather("refer", lambda: _refuse_references(producer, plan, choices), patience)
        finally:
            producer.close()
        if not any(reasons):
            return plan, ""
    return None, next(str(reason) for reason in reasons if reason)


def _check_gathers(sent: Plan, senders: Sequence[int], device: torch.device, group: Group, patience: Deadline) -> None:
    """*Collective.* If some sender lacks a part of what travels: raises if ranks on GPUs cannot gather it.

    Raises `UnsupportedError`, `ConfigError`.
    """
    travels = {meta.name for bucket in sent.buckets for meta in bucket.tensors}
    for spec in sent.specs:
        whole = {owner.rank for owner in spec.owners if owner.region.numel == spec.numel}
        if spec.name in travels and spec.numel and not whole.issuperset(senders):
            break
    else:
        return
    introductions = cast("Sequence[Introduction]", group.gather("introduce", lambda: introduce(device), patience))
    group.local("compare", lambda: compare(introductions), patience)


def _refuse_in_place(producer: Producer, choices: Sequence[Choice], config: SyncConfig) -> str:
    """Why this rank's engines cannot read its weights where they are; "" if nothing is known against it."""
    if config.path == "buckets":
        return "the configuration says so"
    if producer.device.type != "cuda":
        return f"the trainer's weights are on {producer.device}, where buckets cost no launches"
    other = [choice.transport.name for choice in choices if not isinstance(choice.transport, ReferringTransport)]
    return f"{other[0]} moves slots" if other else ""


def _refuse_references(producer: Producer, plan: Plan, choices: Sequence[Choice]) -> str:
    """The same once a plan is there, tensor by tensor."""
    for bucket in plan.buckets:
        tensors = producer.references(bucket)
        if tensors is None:
            return "this trainer's tensors do not lie whole and contiguous on every rank"
        memories = Views.of(tensors).memories
        for choice in choices:
            if isinstance(choice.transport, ReferringTransport):
                reason = choice.transport.refuse_references(memories)
                if reason is not None:
                    return f"{choice.transport.name}: {reason}"
    return ""


def _describe_all(
    specs: Sequence[TensorSpec], engines: Sequence[Engine], group: Group, config: SyncConfig
) -> tuple[Mapping[str, Sequence[Manifest]], frozenset[str]]:
    """The manifests of every replica, and the replicas whose parts are several engines of this session."""
    offered = tuple(replace(spec, owners=()) for spec in specs)

    def manifests() -> Sequence[tuple[str, Sequence[Manifest]]]:
        deadline = Deadline.after(config.timeout_s)
        return [(engine.replica, engine.describe(offered, deadline)) for engine in engines]

    answers = group.gather("describe", manifests, Deadline.beyond(config.timeout_s))
    replicas: dict[str, list[Manifest]] = {}
    parts: Counter[str] = Counter()
    for answer in answers:
        for replica, described in cast("Sequence[tuple[str, Sequence[Manifest]]]", answer):
            replicas.setdefault(replica, []).extend(described)
            parts[replica] += 1
    return replicas, frozenset(replica for replica, count in parts.items() if count > 1)


def merge_specs(by_rank: Sequence[Sequence[TensorSpec]]) -> tuple[TensorSpec, ...]:
    """One spec a tensor, owners of all ranks joined. Raises `MismatchError` if ranks differ or a part is lost."""
    first = by_rank[0]
    for rank, specs in enumerate(by_rank[1:], start=1):
        here = [replace(spec, owners=()) for spec in specs]
        there = [replace(spec, owners=()) for spec in first]
        if here != there:
            odd = [repr(spec.name) for spec in here if spec not in there] or [
                repr(s.name) for s in there if s not in here
            ]
            raise MismatchError(
                f"trainer ranks 0 and {rank} hold different models: {len(first)} against {len(specs)} tensors; "
                f"they differ in {first_five(odd) or 'their order'}"
            )
    merged = tuple(
        replace(
            same[0],
            owners=tuple(replace(owner, rank=rank) for rank, spec in enumerate(same) for owner in spec.owners),
        )
        for same in zip(*by_rank, strict=True)
    )
    lost = [repr(spec.name) for spec in merged if uncovered([owner.region for owner in spec.owners], spec.numel)]
    if lost:
        raise MismatchError(f"no trainer rank holds some part of {first_five(lost)}")
    return merged


def negotiate(
    specs: Sequence[TensorSpec], replicas: Mapping[str, Sequence[Manifest]], dtype: torch.dtype | None
) -> tuple[TensorSpec, ...]:
    """The tensors to send, in wire dtype. Raises `MismatchError` naming the first five problems of all workers.

    Args:
        specs: what the trainer offers.
        replicas: what the workers of each replica said; together they must read all of every tensor.
        dtype: the user's wire dtype for floating-point tensors, or None for what the engines declare.
    """
    manifests = [manifest for workers in replicas.values() for manifest in workers]
    problems = list(dict.fromkeys(problem for manifest in manifests for problem in manifest.problems))
    wanted = []
    for spec in specs:
        declared = [manifest.dtypes[spec.name] for manifest in manifests if spec.name in manifest.dtypes]
        if spec.optional and not declared:
            continue
        for workers in replicas.values():
            if not _reads_all(spec, workers):
                problems.append(f"{spec.name} {list(spec.shape)}: the engine's workers do not read all of it")
        wire_dtype = dtype if dtype is not None and spec.dtype.is_floating_point else _widest(declared, spec.dtype)
        if wire_dtype.is_floating_point != spec.dtype.is_floating_point:
            problems.append(f"{spec.name}: the trainer holds {spec.dtype}, the engine wants {wire_dtype}")
        wanted.append(replace(spec, dtype=wire_dtype))
    if problems:
        raise MismatchError(
            f"trainer and engine do not fit in {len(problems)} place(s), nothing was changed: {first_five(problems)}"
        )
    return tuple(wanted)


def _reads_all(spec: TensorSpec, workers: Sequence[Manifest]) -> bool:
    parts = [part for worker in workers for part in worker.uses.get(spec.name, ())]
    if not parts and spec.optional:
        return True
    if not parts and any(spec.name in worker.through_loader for worker in workers):
        return True  # the loader needs its bytes, so that a dry run cannot tell which of them
    return not uncovered(parts, spec.numel)


def _widest(declared: Sequence[torch.dtype], fallback: torch.dtype) -> torch.dtype:
    return reduce(torch.promote_types, declared) if declared else fallback


def _check_greetings(greetings: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    engines_by_rank = [cast("Sequence[str]", greeting["engines"]) for greeting in greetings]
    if not any(engines_by_rank):
        raise ConfigError(
            f"none of the {len(greetings)} trainer rank(s) passed an engine; pass it on the rank that owns it "
            f"and None on the others"
        )
    odd = [rank for rank, greeting in enumerate(greetings) if greeting["settings"] != greetings[0]["settings"]]
    if odd:
        raise ConfigError(
            f"trainer ranks {odd} passed another config than rank 0: "
            f"{greetings[odd[0]]['settings']} against {greetings[0]['settings']}"
        )
    return engines_by_rank


def _choose_all(
    producer: Producer, engines: Sequence[Engine], transports: Sequence[Transport], config: SyncConfig
) -> list[Choice]:
    here = local_endpoint(producer.device)
    return [
        choose(Topology(sender=here, receivers=tuple(engine.endpoints())), transports, config.transport)
        for engine in engines
    ]
