"""What an engine's own loader does with each tensor, as data: copies that a worker can replay without the loader.

A load plan is recorded by `wsync.dryrun` and replayed by `wsync.replay`. Two coordinate systems appear in it. A
*source* is a tensor that the trainer sends; its regions are positions in the flattened full tensor. A *target* is a
live parameter or buffer; its regions are positions in its memory, counted from its first element. For a contiguous
target that is the flattened tensor too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from wsync.errors import MismatchError, first_five
from wsync.plan import TensorSpec
from wsync.regions import Region
from wsync.traits import Traits, traits


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """`target[dst] = source[src]`, with a cast to the target's dtype if it differs. Both regions have equal sizes."""

    source: str
    src: Region
    target: str
    dst: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """`target[dst] = value`: padding, such as rows of a vocabulary that no checkpoint has."""

    target: str
    dst: Region
    value: bool | int | float | complex
    source: str | None
    """Source that was being loaded; None if the loader did it before the first or after the last one."""

    last: bool = False
    """True if it comes after every copy that it overlaps, False if before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """A write that only the loader itself can do. It counts for coverage and is never replayed."""

    target: str
    dst: Region
    sources: frozenset[str]
    """Sources that the written value depends on; empty for a constant."""

    reads: frozenset[str]
    """Live targets whose own value it depends on."""


Write = Copy | Fill | Cover


@dataclass(frozen=True, slots=True)
class Layout:
    """What a target looked like when the plan was recorded, and where it was."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    data_ptr: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        """The layout of `tensor` now."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.data_ptr())

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` still has this layout; it may have moved."""
        return self.dtype == tensor.dtype and self.shape == tensor.shape and self.strides == tensor.stride()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """One worker's loader, recorded for one list of specs."""

    specs: Mapping[str, TensorSpec]
    """Every source that the plan was recorded for, in the order in which it was offered."""

    declined: frozenset[str]
    """Optional sources that were offered and are not wanted: they may arrive, and nothing is done with them."""

    writes: tuple[Write, ...]
    """All writes in the order of the loader; copies are in `copies` too."""

    through_loader: Mapping[str, str]
    """Source -> why it goes through the engine's own loader."""

    unfollowed: frozenset[str]
    """Sources in `through_loader` whose targets could not be found out."""

    elsewhere: frozenset[str]
    """Sources in `through_loader` that are written to a tensor that is no target."""

    always_call: bool
    """True if the loader writes something by itself, so that it is called even when nothing goes through it."""

    layouts: Mapping[str, Layout]
    """Every target that is written."""

    refused: frozenset[str]
    """Sources that the loader refused; each has a sentence in `problems`."""

    uses: Mapping[str, tuple[Region, ...]]
    """Source -> the parts of it that this worker reads."""

    dtypes: Mapping[str, frozenset[torch.dtype]]
    """Source -> dtypes of the targets that it is written to."""

    problems: tuple[str, ...]
    """What the loader refused, one sentence each."""

    _traits: Traits | None = field(init=False, repr=False, compare=False)
    """Of `layouts`; None if one has a dtype of which there are no tensors without memory."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_traits", _traits_of(self.layouts.values()))

    @property
    def copies(self) -> list[Copy]:
        """Writes that are replayed from arrived tensors."""
        return [write for write in self.writes if isinstance(write, Copy)]

    @property
    def fills(self) -> list[Fill]:
        """Writes that are replayed without any tensor."""
        return [write for write in self.writes if isinstance(write, Fill)]

    @property
    def needs_loader(self) -> bool:
        """Whether a sync calls the engine's loader at all."""
        return self.always_call or bool(self.through_loader)

    def matches(self, specs: Mapping[str, TensorSpec]) -> bool:
        """Whether the plan was recorded for just these names, shapes and dtypes, but for what it declines."""
        return {n: (s.shape, s.dtype) for n, s in specs.items() if not (s.optional and n in self.declined)} == {
            n: (s.shape, s.dtype) for n, s in self.specs.items()
        }

    def check_layouts(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Raises `MismatchError` if a target is gone or changed its shape; it may have moved."""
        if self.layouts.keys() <= targets.keys() and traits([targets[name] for name in self.layouts]) == self._traits:
            return
        changed = [
            f"{name} ({_describe(layout)}, now {_describe(Layout.of(targets[name])) if name in targets else 'gone'})"
            for name, layout in self.layouts.items()
            if name not in targets or not layout.is_of(targets[name])
        ]
        if changed:
            raise MismatchError(
                f"{len(changed)} parameters changed since the load plan was made: {first_five(changed)}. "
                f"Close the session and connect again"
            )


def _traits_of(layouts: Iterable[Layout]) -> Traits | None:
    try:
        return traits(
            [torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta") for layout in layouts]
        )
    except NotImplementedError:
        return None


def _describe(layout: Layout) -> str:
    return f"{layout.dtype} {list(layout.shape)} with strides {list(layout.strides)}"
