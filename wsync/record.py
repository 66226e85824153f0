"""Runs an engine's own loader without bytes and turns what it did into a load plan."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from wsync.dryrun import Findings, NeedsValue, Rebinds, Recorder
from wsync.errors import EngineStateError, MismatchError, first_five
from wsync.loadplan import Copy, Cover, Fill, Layout, LoadPlan, Write
from wsync.plan import TensorSpec
from wsync.protocols import Loader
from wsync.regions import Region, uncovered
from wsync.strided import ascending
from wsync.targets import Targets
from wsync.traits import any_inference


def writable(targets: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
    """Context to write `targets` in place: without autograd, in inference mode if they were made in it."""
    inference = targets.inference if isinstance(targets, Targets) else any_inference(list(targets.values()))
    return torch.no_grad() if inference == torch.is_inference_mode_enabled() else _writable(inference)


@contextmanager
def _writable(inference: bool) -> Iterator[None]:
    with torch.inference_mode(inference), torch.no_grad():
        yield


def record(loader: Loader, specs: Sequence[TensorSpec]) -> LoadPlan:
    """Dry-run `loader` on meta tensors of `specs`. No byte of a live tensor changes.

    What the loader refuses is in `LoadPlan.problems`. Optional specs that it does not want are only in
    `LoadPlan.declined`.

    Raises:
        MismatchError: live tensors are on the meta device.
        EngineStateError: the loader replaced live tensors in spite of all care; the engine must be restarted.
    """
    offered = {spec.name: spec for spec in specs if not spec.optional or loader.accepts(spec.name)}
    targets = dict(loader.targets())
    if bare := [name for name, tensor in targets.items() if tensor.device.type == "meta"]:
        raise MismatchError(f"{loader.engine}: parameters without memory: {first_five(bare)}; is it still loading?")
    layouts = {name: Layout.of(tensor) for name, tensor in targets.items()}
    sources = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in offered.items()}
    recorder = Recorder(targets, sources)
    problems = _DryRun(loader, recorder, sources).run(writable(targets))
    _check_in_place(loader, layouts)
    declined = frozenset(spec.name for spec in specs) - offered.keys()
    return _settle(recorder.found, offered, declined, layouts, problems)


@dataclass(slots=True)
class _DryRun:
    """The calls of one dry run: each goes on behind the source that stopped the one before."""

    loader: Loader
    recorder: Recorder
    sources: Mapping[str, torch.Tensor]

    def run(self, context: AbstractContextManager[None]) -> list[str]:
        """Offer every source. Returns a sentence for each that was refused."""
        found = self.recorder.found
        problems: list[str] = []
        postponed: list[str] = []
        pending = list(self.sources)
        one_by_one = False
        with context, _no_rebinding(self.recorder):
            while pending:
                batch, pending = (pending[:1], pending[1:]) if one_by_one else (pending, [])
                handed: list[str] = []
                known = set(found.unfollowed)
                error = self._offer(batch, handed)
                if error is None:
                    continue
                # A loader that collects its input first fails when it has all of it: then ask one at a time.
                collected = self.recorder.current is None and len(handed) > 1
                culprits = found.unfollowed - known or set(handed[-1:] if not collected else ())
                idle = [name for name in handed if name not in found.written and name not in culprits]
                one_by_one = one_by_one or (collected and bool(idle))
                (postponed if collected and idle else problems).extend(self._judge(error, culprits))
                if not handed:
                    break  # the loader fails without any tensor
                again = idle if collected else [name for name in idle if name == handed[-1]]
                pending = again + batch[len(handed) :] + pending
        return problems or (postponed if not found.unfollowed else [])

    def _offer(self, names: Sequence[str], handed: list[str]) -> Exception | None:
        try:
            with self.recorder:
                self.loader.load_weights(self._feed(names, handed))
        except Exception as error:
            return error
        self.recorder.current = None
        return None

    def _feed(self, names: Sequence[str], handed: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            self.recorder.current = name
            handed.append(name)
            yield name, self.sources[name]
        self.recorder.current = None

    def _judge(self, error: Exception, culprits: set[str]) -> list[str]:
        """Whether the loader needs bytes of `culprits` (they go through the loader) or refuses them."""
        found = self.recorder.found
        found.unfollowed |= culprits
        names = first_five(sorted(culprits)) or "after the last tensor"
        for cause in _causes(error):
            if isinstance(cause, Rebinds):
                return [
                    f"{names}: {self.loader.engine} puts other memory under the live tensor {cause}; "
                    f"addresses must stay, so an in-place loader is needed"
                ]
            if culprits and (isinstance(cause, NeedsValue) or any(word in str(cause).lower() for word in _NO_BYTES)):
                for name in culprits:
                    found.reasons.setdefault(name, f"the loader needs its bytes ({_line(cause)})")
                return []
        said = _line(error).removeprefix(f"{names}: ")
        return [f"{names}: {self.loader.engine} refuses it ({type(error).__name__}: {said})"]


_NO_BYTES = ("meta", "unallocated storage")
"""Words of PyTorch's messages when something below the dispatcher asks a meta tensor for its bytes."""


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:200]


class _DataGuard(TorchFunctionMode):
    """Stops `parameter.data = other`, which no dispatch mode sees."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__set__" and func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            _refuse_rebinding(self._recorder, args[0], None)
        return func(*args, **(kwargs or {}))


def _refuse_rebinding(recorder: Recorder, old: torch.Tensor | None, new: torch.Tensor | None) -> None:
    if old is None or old is new or not recorder.is_live(old):
        return
    found = recorder.target_of(old)
    raise Rebinds(found[0] if found else "?")


@contextmanager
def _no_rebinding(recorder: Recorder) -> Iterator[None]:
    def parameter(module: torch.nn.Module, name: str, new: torch.Tensor | None) -> None:
        _refuse_rebinding(recorder, module._parameters.get(name), new)

    def buffer(module: torch.nn.Module, name: str, new: torch.Tensor | None) -> None:
        _refuse_rebinding(recorder, module._buffers.get(name), new)

    with ExitStack() as stack:
        stack.callback(register_module_parameter_registration_hook(parameter).remove)
        stack.callback(register_module_buffer_registration_hook(buffer).remove)
        stack.enter_context(_DataGuard(recorder))
        yield


def _check_in_place(loader: Loader, layouts: Mapping[str, Layout]) -> None:
    after = {name: Layout.of(tensor) for name, tensor in loader.targets().items()}
    moved = [name for name in layouts if after.get(name) != layouts[name]]
    if moved:
        raise EngineStateError(
            f"the loader of {loader.engine} replaced live tensors during a dry run: {first_five(moved)}. "
            f"Restart the engine; this loader cannot be used, because addresses must stay"
        )


# From findings to a plan.


def _settle(
    found: Findings,
    specs: Mapping[str, TensorSpec],
    declined: frozenset[str],
    layouts: Mapping[str, Layout],
    problems: Sequence[str],
) -> LoadPlan:
    reasons = {name: why for name, why in found.reasons.items() if name in specs}
    always_call = found.always_call
    for write in found.writes:
        if isinstance(write, Cover) and write.reads:
            _spread(found.writes, write, reasons)
    fills = _order(found.writes, reasons)
    always_call |= any(isinstance(write, Fill) and write not in fills for write in found.writes)
    refused = found.unfollowed - reasons.keys()
    writes = [_final(write, reasons, fills) for write in found.writes]
    return LoadPlan(
        specs=dict(specs),
        declined=declined,
        writes=tuple(write for write in writes if not _depends_on(write, refused)),
        through_loader={name: reasons[name] for name in specs if name in reasons and name not in refused},
        unfollowed=frozenset(found.unfollowed & reasons.keys()),
        elsewhere=frozenset(found.elsewhere),
        refused=frozenset(refused),
        always_call=always_call,
        layouts={name: layouts[name] for name in dict.fromkeys(write.target for write in writes)},
        uses={name: tuple(dict.fromkeys(parts)) for name, parts in found.uses.items() if name not in refused},
        dtypes={name: frozenset(dtypes) for name, dtypes in found.dtypes.items()},
        problems=tuple(problems),
    )


def _spread(writes: Iterable[Write], cover: Cover, reasons: dict[str, str]) -> None:
    """A value computed from live targets depends on every source of these: all of them go through the loader."""
    for write in writes:
        if write.target in cover.reads or write.target == cover.target:
            for source in _sources(write):
                reasons.setdefault(source, f"the loader computes {cover.target} from live values that it belongs to")


def _sources(write: Write) -> frozenset[str]:
    if isinstance(write, Copy):
        return frozenset({write.source})
    if isinstance(write, Fill):
        return frozenset({write.source} if write.source is not None else ())
    return write.sources


def _depends_on(write: Write, refused: set[str]) -> bool:
    return bool(refused) and bool(_sources(write) & refused)


def _final(write: Write, reasons: Mapping[str, str], fills: Mapping[Fill, bool]) -> Write:
    """Writes of sources that go through the loader only count for coverage."""
    if isinstance(write, Fill) and write in fills and write.source not in reasons:
        return replace(write, last=fills[write])
    if isinstance(write, Cover) or (isinstance(write, Copy) and write.source not in reasons):
        return write
    return Cover(target=write.target, dst=write.dst, sources=_sources(write), reads=frozenset())


def _order(writes: Sequence[Write], reasons: dict[str, str]) -> dict[Fill, bool]:
    """Where buckets may arrive in another order than the loader's, order must not matter.

    Copies that overlap go through the loader. A fill may come before or after all writes that it overlaps.

    Returns:
        For each such fill whether it comes after them; one between them is absent.
    """
    by_target: dict[str, list[tuple[int, Write]]] = defaultdict(list)
    for index, write in enumerate(writes):
        by_target[write.target].append((index, write))
    last: dict[Fill, bool] = {}
    for items in by_target.values():
        if _is_disjoint([write.dst for _, write in items]):
            last.update((write, True) for _, write in items if isinstance(write, Fill))
            continue
        for index, write in items:
            rivals = [(i, w) for i, w in items if i != index and _overlap(w.dst, write.dst)]
            if isinstance(write, Fill):
                after = [index > i for i, _ in rivals]
                if all(after) or not any(after):
                    last[write] = all(after)
                    continue
            else:
                rivals = [(i, w) for i, w in rivals if not isinstance(w, Fill)]
            for source in frozenset[str]().union(*(_sources(w) for _, w in rivals), _sources(write) if rivals else ()):
                reasons.setdefault(source, f"several tensors are written to the same part of {write.target}")
    return last


def _is_disjoint(regions: Sequence[Region]) -> bool:
    if len(regions) < 2:
        return True
    reach = max(region.bounds[1] for region in regions)
    covered = reach - sum(hole.numel for hole in uncovered(regions, reach))
    return covered == sum(region.numel for region in regions)


def _overlap(one: Region, other: Region) -> bool:
    (low, high), (begin, end) = one.bounds, other.bounds
    return low < end and begin < high and bool(ascending(one).intersect(ascending(other)))
