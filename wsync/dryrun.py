"""Watches a loader at work on meta tensors, and keeps it from writing.

While a `Recorder` is active every operator that would write into a live parameter or buffer is swallowed and logged
instead. Sources are meta tensors: they have a shape and a storage to be known by, and no bytes. A copy from a source
is logged as such; a value that was computed is known by the sources that it depends on. What the loader cannot do
without bytes (`.item()`, numpy, branching on a value) raises `NeedsValue`, and what would move a live parameter to
other memory raises `Rebinds`: in both cases before anything has changed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from wsync.loadplan import Copy, Cover, Fill, Write
from wsync.regions import Region
from wsync.strided import offset_of, pair, positions, storage_of

aten = torch.ops.aten

_COPIES = {aten.clone.default, aten._to_copy.default}
_CONSTANT_FILLS = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
_REBINDS = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::swap_"}
_SHAPE_ONLY = {
    "aten::empty_like",
    "aten::zeros_like",
    "aten::ones_like",
    "aten::full_like",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::new_zeros",
    "aten::new_ones",
    "aten::new_full",
}


class NeedsValue(Exception):
    """The loader asked for bytes of a source; in a dry run there are none."""


class Rebinds(Exception):
    """The loader would have given a live parameter other memory."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a tensor's value depends on."""

    sources: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    """Live targets."""

    def __or__(self, other: "Origin") -> "Origin":
        return Origin(self.sources | other.sources, self.reads | other.reads)


@dataclass(frozen=True, slots=True)
class Plain:
    """A view of a source, as positions in the flattened source, in the shape in which the loader sees it."""

    source: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Live:
    name: str
    tensor: torch.Tensor
    begin: int
    end: int


@dataclass(slots=True)
class Findings:
    """What a recorder saw, in the order in which it happened."""

    writes: list[Write] = field(default_factory=list)
    uses: dict[str, list[Region]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Source -> why a replay cannot do it."""

    unfollowed: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    """Sources that are written to a tensor that is no target."""

    written: set[str] = field(default_factory=set)
    """Sources that some write depends on."""

    dtypes: dict[str, set[torch.dtype]] = field(default_factory=dict)
    always_call: bool = False


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode. `current` is the source that the loader was handed last; None before and after."""

    def __init__(self, targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Findings()
        self.current: str | None = None
        self._sources = {storage_of(tensor): name for name, tensor in sources.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in sources.items()}
        self._live: dict[int, list[_Live]] = {}
        for name, tensor in sorted(targets.items(), key=lambda item: -item[1].numel()):
            self._live.setdefault(storage_of(tensor), []).append(_Live(name, tensor, *_extent(tensor)))
        self._origins: dict[int, Origin] = {}
        self._clones: dict[int, tuple[Plain, torch.Tensor]] = {}  # kept alive: a storage is known by its address
        self._edited: set[str] = set()

    def is_live(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is, or is a view of, a target."""
        return tensor.layout == torch.strided and storage_of(tensor) in self._live

    def target_of(self, tensor: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """The target whose memory holds all of `tensor`."""
        low, high = _extent(tensor)
        for live in self._live.get(storage_of(tensor), ()):
            if live.begin <= low and high <= live.end and live.tensor.dtype.itemsize == tensor.dtype.itemsize:
                return live.name, live.tensor
        return None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operator would import the compiler, for seconds, only to keep it away from here

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        if func is aten.copy_.default:
            return self._copy(args[0], args[1], func, args, kwargs)
        if func is aten._foreach_copy_.default:
            for dst, src in zip(args[0], args[1], strict=True):
                self._copy(dst, src, aten.copy_.default, (dst, src), {})
            return None
        written = _written(func, args, kwargs)
        if written:
            return self._write(func, args, kwargs, inputs, written)
        return self._read(func, args, kwargs, inputs)

    # Where values come from.

    def _origin(self, tensor: torch.Tensor) -> Origin:
        if tensor.layout != torch.strided:
            return Origin()
        key = storage_of(tensor)
        if key in self._sources:
            return Origin(frozenset({self._sources[key]}))
        if key in self._live:
            found = self.target_of(tensor)
            return Origin(reads=frozenset({found[0] if found else self._live[key][0].name}))
        return self._origins.get(key, Origin())

    def _join(self, tensors: Iterable[torch.Tensor]) -> Origin:
        origin = Origin()
        for tensor in tensors:
            origin |= self._origin(tensor)
        return origin

    def _plain(self, tensor: torch.Tensor) -> Plain | None:
        """`tensor` as unchanged elements of one source, or None."""
        key = storage_of(tensor)
        source = self._sources.get(key)
        if source is not None:
            if source in self._edited or tensor.dtype != self._dtypes[source]:
                return None
            return Plain(source, offset_of(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        base = self._clones[key][0] if key in self._clones else None
        if base is None or base.source in self._edited or tensor.dtype != base.dtype:
            return None
        whole = tensor.is_contiguous() and offset_of(tensor) == 0 and tuple(tensor.shape) == base.sizes
        return base if whole else None

    def _note_read(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            source = self._sources.get(storage_of(tensor)) if tensor.layout == torch.strided else None
            if source is not None:
                part = positions(offset_of(tensor), tensor.shape, tensor.stride())
                self.found.uses.setdefault(source, []).append(part)

    def _needs_value(self, origin: Origin, why: str) -> NeedsValue:
        for source in origin.sources or ({self.current} if self.current is not None else set()):
            self.found.reasons.setdefault(source, why)
            self.found.unfollowed.add(source)
        return NeedsValue(why)

    # Operators that write nothing.

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]) -> Any:
        origin = self._join(inputs)
        if not origin.sources and not origin.reads:
            return self._adopt(func(*args, **kwargs), inputs, origin)
        if origin.sources:
            if func is aten._local_scalar_dense.default:
                raise self._needs_value(origin, "the loader reads its value")
            if func is aten._to_copy.default and _is_move(args[0], kwargs):
                return aten.alias.default(args[0])
            args, kwargs = _on_meta(args, kwargs)
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            raise self._needs_value(origin, f"the loader calls {func} on it") from error
        plain = self._plain(inputs[0]) if func in _COPIES else None
        if plain is not None and result.dtype == plain.dtype:
            self._clones[storage_of(result)] = (plain, result)
        return self._adopt(result, inputs, Origin() if func._schema.name in _SHAPE_ONLY else origin)

    def _adopt(self, result: Any, inputs: list[torch.Tensor], origin: Origin) -> Any:
        """Remember where new storages in `result` come from; views keep the origin of their base."""
        known = {storage_of(tensor) for tensor in inputs if tensor.layout == torch.strided}
        fresh = False
        for leaf in _tensors((result,)):
            if leaf.layout == torch.strided and storage_of(leaf) not in known:
                self._origins[storage_of(leaf)] = origin
                fresh = True
        if fresh and origin.sources:
            self._note_read(inputs)
        return result

    # Operators that write.

    def _copy(self, dst: torch.Tensor, src: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        plain = self._plain(src)
        found = self.target_of(dst)
        if plain is None or found is None or not self._log_copy(plain, src, dst, *found):
            return self._write(func, args, kwargs, [dst, src], [dst])
        return dst

    def _log_copy(self, plain: Plain, src: torch.Tensor, dst: torch.Tensor, name: str, target: torch.Tensor) -> bool:
        if src.shape != dst.shape:
            src.expand(dst.shape)  # raises if the shapes do not fit, in words that the loader's author knows
        while plain.sizes[:1] == (1,) and len(plain.sizes) > dst.dim():
            plain = Plain(plain.source, plain.offset, plain.sizes[1:], plain.strides[1:], plain.dtype)
        lead = dst.dim() - len(plain.sizes)
        sizes = (1,) * lead + plain.sizes
        if sizes != tuple(dst.shape) or dst.dtype != target.dtype:
            return False
        offset = offset_of(dst) - offset_of(target)
        regions = pair(sizes, (plain.offset, (0,) * lead + plain.strides), (offset, dst.stride()))
        if regions is None:
            return False
        self.found.writes.append(Copy(source=plain.source, src=regions[0], target=name, dst=regions[1]))
        self.found.written.add(plain.source)
        self.found.uses.setdefault(plain.source, []).append(regions[0])
        self.found.dtypes.setdefault(plain.source, set()).add(target.dtype)
        return True

    def _write(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        written: list[torch.Tensor],
    ) -> Any:
        origin = self._join(tensor for tensor in inputs if func is not aten.copy_.default or tensor is not written[0])
        swallow = bool(origin.sources)
        for tensor in written:
            key = storage_of(tensor)
            if key in self._live:
                self._write_live(func, args, tensor, origin)
                swallow = True
            elif key in self._sources:
                self._edit(self._sources[key])
            elif key in self._origins:
                self._origins[key] |= origin
                self._clones.pop(key, None)
            else:
                self._write_foreign(origin)
                swallow = True
        if not swallow:
            return func(*args, **kwargs)
        if origin.sources:
            self._note_read(inputs)
        self._simulate(func, args, kwargs, origin)
        if any(item.alias_info is None for item in func._schema.returns):
            raise self._needs_value(origin, f"the loader calls {func}, which both writes and returns something new")
        returns = len(func._schema.returns)
        return (written[0] if returns == 1 else tuple(written)) if returns else None

    def _simulate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Origin) -> None:
        """Run the operator on meta copies of everything, so that wrong shapes raise as they would."""
        meta_args, meta_kwargs = _on_meta(args, kwargs, always=True)
        try:
            func(*meta_args, **meta_kwargs)
        except NotImplementedError as error:
            raise self._needs_value(origin, f"the loader calls {func} on it") from error

    def _write_live(self, func: Any, args: tuple[Any, ...], dst: torch.Tensor, origin: Origin) -> None:
        if func._schema.name in _REBINDS:
            raise Rebinds(self._live[storage_of(dst)][0].name)
        found = self.target_of(dst)
        if found is None:
            self._write_foreign(origin)
            return
        name, target = found
        region = positions(offset_of(dst) - offset_of(target), dst.shape, dst.stride())
        value = args[1] if len(args) > 1 else 0
        constant = not isinstance(value, torch.Tensor) or self._origin(value) == Origin()
        if func in _CONSTANT_FILLS and constant and dst.dtype == target.dtype:
            number = value.item() if isinstance(value, torch.Tensor) else value
            self.found.writes.append(Fill(target=name, dst=region, value=number, source=self.current))
            return
        sources = origin.sources | frozenset({self.current} if self.current is not None else ())
        self.found.writes.append(Cover(target=name, dst=region, sources=sources, reads=origin.reads))
        self.found.written |= sources
        for source in sources:
            self.found.reasons.setdefault(source, f"the loader computes {name} from it ({func})")
            self.found.dtypes.setdefault(source, set()).add(target.dtype)
        if not sources:
            self.found.always_call = True

    def _edit(self, source: str) -> None:
        self._edited.add(source)
        self.found.reasons.setdefault(source, "the loader edits it in place")

    def _write_foreign(self, origin: Origin) -> None:
        sources = origin.sources | frozenset({self.current} if self.current is not None else ())
        for source in sources:
            self.found.reasons.setdefault(source, "the loader writes to a tensor that is no parameter or buffer")
        self.found.elsewhere |= origin.sources
        self.found.always_call |= not sources


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First position in the storage, and one more than the last."""
    begin, last = offset_of(tensor), 0
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return begin, begin
        last += (size - 1) * stride
    return begin, begin + last + 1


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments or results, in lists too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_move(tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether `_to_copy` changes the device at most. Between real tensors it gives equal bytes in equal strides."""
    same_dtype = kwargs.get("dtype") in (None, tensor.dtype)
    return same_dtype and kwargs.get("memory_format") in (None, torch.preserve_format)


@cache
def _write_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in _write_arguments(func)]
    return list(_tensors(values))


def _on_meta(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, always: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every real tensor replaced by a meta tensor of its shape; with `always`, meta ones too."""

    def swap(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and (always or leaf.device.type != "meta"):
            return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    return cast("tuple[tuple[Any, ...], dict[str, Any]]", pytree.tree_map(swap, (args, dict(kwargs))))
