"""Compares what the trainer offers with what an engine worker takes: every mistake found before a byte is written."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from wsync.errors import first_five
from wsync.loadplan import LoadPlan, Write
from wsync.protocols import Manifest
from wsync.regions import Region, uncovered
from wsync.strided import ascending, offset_of, positions, storage_of
from wsync.topology import Endpoint


def declared_dtypes(plan: LoadPlan) -> dict[str, torch.dtype]:
    """Source -> the dtype in which the engine wants it: its target's, or its own where that is no plain cast."""
    declared = {}
    for name, spec in plan.specs.items():
        wanted = spec.dtype
        targets = sorted(plan.dtypes.get(name, ()), key=str)
        if targets and not any(_refusal(spec.dtype, target) for target in targets):
            wanted = targets[0]
            for target in targets[1:]:
                wanted = torch.promote_types(wanted, target)
        if name not in plan.refused:
            declared[name] = wanted
    return declared


def manifest(
    plan: LoadPlan,
    targets: Mapping[str, torch.Tensor],
    required: Sequence[str],
    *,
    engine: str,
    endpoint: Endpoint,
    launch: tuple[str, Sequence[str]],
) -> Manifest:
    """What a worker answers to `describe`.

    Args:
        plan: recorded for the declared dtypes.
        targets: the live tensors of the recording.
        required: names in `targets` that the sources must cover.
        engine: its name, for messages.
        endpoint: where the live tensors are.
        launch: how the plan was checked against the launch weights, and what was wrong.
    """
    dtypes = declared_dtypes(plan)
    problems = [*plan.problems, *_ignored(plan, engine), *_bad_dtypes(plan, engine)]
    problems += holes(plan, targets, required)
    return Manifest(
        dtypes=dtypes,
        uses={name: _uses(plan, name) for name in dtypes},
        problems=(*problems, *launch[1]),
        replayed=len(dtypes) - len(plan.through_loader),
        through_loader=dict(plan.through_loader),
        verified=launch[0],
        endpoint=endpoint,
    )


def holes(plan: LoadPlan, targets: Mapping[str, torch.Tensor], required: Sequence[str]) -> list[str]:
    """A sentence for each required target of which some part is written by no source."""
    by_storage: dict[int, list[Write]] = defaultdict(list)
    for write in plan.writes:
        by_storage[storage_of(targets[write.target])].append(write)
    sentences = []
    excuses = {name: plan.specs[name].numel for name in plan.unfollowed}
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    for name in required:
        target = targets[name]
        place = (storage_of(target), offset_of(target), tuple(target.shape))
        if place in seen:
            continue  # tied: the same memory under a second name
        seen.add(place)
        writes = by_storage[place[0]]
        missing = _missing(target, [(write, targets[write.target]) for write in writes])
        if missing and not _excuse(excuses, missing, target):
            writers = sorted({source for write in writes for source in _writers(write)})
            sentences.append(_hole(name, target, missing, writers, plan.unfollowed))
    return sentences


def _missing(target: torch.Tensor, writes: Iterable[tuple[Write, torch.Tensor]]) -> list[Region]:
    whole = positions(0, target.shape, target.stride())
    reach = whole.bounds[1]
    inside = Region.span(0, reach)
    parts: list[Region] = []
    for write, base in writes:
        part = write.dst.translate(offset_of(base) - offset_of(target))
        low, high = part.bounds
        parts += [part] if low >= 0 and high <= reach else ascending(part).intersect(inside)
    free = uncovered(parts, reach)
    return list(free) if target.is_contiguous() else [hole for part in free for hole in whole.intersect(part)]


def _excuse(excuses: dict[str, int], missing: Sequence[Region], target: torch.Tensor) -> bool:
    """A target that nothing else writes may be that of a source that could not be followed, if it has its size.

    That is a guess: any unfollowed source of the same size will do, so it may excuse a parameter that nothing writes.
    """
    if sum(region.numel for region in missing) != target.numel():
        return False
    for name, numel in excuses.items():
        if numel == target.numel():
            del excuses[name]
            return True
    return False


def _writers(write: Write) -> frozenset[str]:
    sources = getattr(write, "sources", None)
    if sources is not None:
        return frozenset(sources)
    source = getattr(write, "source", None)
    return frozenset({source} if source is not None else ())


def _hole(
    name: str, target: torch.Tensor, missing: Sequence[Region], writers: Sequence[str], unfollowed: Iterable[str]
) -> str:
    count = sum(region.numel for region in missing)
    shape = "x".join(map(str, target.shape)) or "scalar"
    if count == target.numel():
        sentence = f"{name} ({shape}): no tensor is written to it"
    else:
        sentence = f"{name} ({shape}): {_words(target, missing)} written by no tensor; it gets {first_five(writers)}"
    lost = sorted(unfollowed)
    return f"{sentence}; not followed: {first_five(lost)}" if lost else sentence


def _words(target: torch.Tensor, missing: Sequence[Region]) -> str:
    """The holes as ranges of rows where they are whole rows, else as ranges of elements."""
    ranges = [region.bounds for region in missing if region.numel == region.bounds[1] - region.bounds[0]]
    row = target[0].numel() if target.dim() > 1 and target.is_contiguous() else 1
    if len(ranges) == len(missing) and all(low % row == 0 and high % row == 0 for low, high in ranges):
        unit = "rows" if row > 1 else "elements"
        shown = [f"{low // row}-{high // row - 1}" for low, high in ranges]
        return f"{unit} {first_five(shown)} are"
    return f"{sum(region.numel for region in missing)} elements are"


def _ignored(plan: LoadPlan, engine: str) -> list[str]:
    written = {source for write in plan.writes for source in _writers(write)}
    known = written | plan.refused | plan.unfollowed | plan.elsewhere
    return [
        f"{name}: {engine} ignores it: it is written to no parameter or buffer"
        for name, spec in plan.specs.items()
        if spec.numel and name not in known
    ]


def _bad_dtypes(plan: LoadPlan, engine: str) -> list[str]:
    return [
        f"{name}: {engine} keeps it as {target}, and {why}"
        for name, spec in plan.specs.items()
        for target in sorted(plan.dtypes.get(name, ()), key=str)
        if (why := _refusal(spec.dtype, target)) is not None
    ]


def _refusal(source: torch.dtype, target: torch.dtype) -> str | None:
    """Why a plain cast from `source` to `target` would not be the value that the engine means."""
    if source == target:
        return None
    if source.is_floating_point != target.is_floating_point or source.is_complex != target.is_complex:
        return f"{source} cannot be cast to that; send it quantised as the engine's checkpoint has it"
    if target.is_floating_point and target.itemsize == 1:
        return f"{source} cannot be cast to that without its scales"
    return None


def _uses(plan: LoadPlan, name: str) -> tuple[Region, ...]:
    """The parts that are read, without repeats; all of a source that could not be followed."""
    parts, numel = plan.uses.get(name, ()), plan.specs[name].numel
    if name in plan.unfollowed or (len(parts) > 1 and not uncovered(parts, numel)):
        return (Region.span(0, numel),)
    return tuple(dict.fromkeys(part.coalesce() for part in parts))
