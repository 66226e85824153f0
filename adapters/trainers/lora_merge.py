"""The arithmetic of merging: any part of `W + scaling * B @ A`, without the rest and without touching W."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from wsync.adapters.trainers.exchange import Layout
from wsync.adapters.trainers.lora_layers import Term
from wsync.errors import UnsupportedError
from wsync.regions import Region

_BASE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """Rows and columns of a tensor seen as a matrix (dims after the first are one) around the elements of a rank."""

    rows: slice
    cols: slice
    inside: Region | None
    """The elements in the flattened window; None if they are all of it."""

    @property
    def size(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.cols.stop - self.cols.start


@torch.no_grad()
def merge(
    local: torch.Tensor, layout: Layout, terms: Sequence[Term], factors: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """`local` with all `terms` added, in float32 (float64 if that is what it has) and with the strides of `local`.

    Args:
        local: the elements of a weight that this rank has.
        layout: of which weight, and which elements.
        terms: what to add, in order.
        factors: full factors by name.
    """
    dtype = torch.promote_types(layout.dtype, torch.float32)
    out = torch.empty_strided(local.shape, local.stride(), dtype=dtype, device=local.device)
    if not local.numel():
        return out
    window, so_far = _window(layout), local
    for term in terms:
        if _in_one_pass(term, window, out):
            _add_in_one_pass(term, window, factors, so_far, out)
        else:
            if so_far is local:
                out.copy_(local)
            with _exact(local.device.type):
                _add(term, window, factors, out)
        so_far = out
    return out


def check_mergeable(name: str, layout: Layout, terms: Sequence[Term]) -> None:
    """Raise `UnsupportedError` if this rank cannot merge its part of the tensor `name` by itself."""
    if layout.dtype not in _BASE_DTYPES:
        raise UnsupportedError(
            f"{name} is {layout.dtype}; LoRA can be merged into floating-point weights of 16 bits up"
        )
    if not layout.region.numel:
        return
    window = _window(layout)
    rows, cols = layout.shape[0], math.prod(layout.shape[1:])
    for term in terms:
        whole = window.size[0] == rows if term.transposed else window.size[1] == cols
        if term.magnitude is not None and (window.inside is not None or not whole):
            raise UnsupportedError(
                f"{name} {list(layout.shape)} has DoRA, and this rank's part of it ends within the vector of an "
                f"output, whose length it needs; shard it along dim {1 if term.transposed else 0}, or use plain LoRA"
            )


@lru_cache(1 << 14)
def _window(layout: Layout) -> _Window:
    cols = math.prod(layout.shape[1:])
    low, high = layout.region.bounds
    first, last = low // cols, -(-high // cols)
    flat, width = layout.region.coalesce(), layout.region.run_length
    start = low % cols
    if width < cols and start + width <= cols and flat.numel == (last - first) * width and _is_column(flat, cols):
        return _Window(rows=slice(first, last), cols=slice(start, start + width), inside=None)
    whole = flat.numel == (last - first) * cols
    inside = None if whole else flat.translate(-first * cols)
    return _Window(rows=slice(first, last), cols=slice(0, cols), inside=inside)


def _is_column(flat: Region, cols: int) -> bool:
    """Whether a coalesced region is runs that begin one row apart; a single run is."""
    strides = [stride for stride in flat.strides if stride != 1]
    return strides in ([], [cols])


def _in_one_pass(term: Term, window: _Window, out: torch.Tensor) -> bool:
    """Whether a kernel adds `term`: a plain matrix on a GPU."""
    plain = term.a is not None and not term.experts and term.magnitude is None
    return plain and window.inside is None and out.is_cuda and out.is_contiguous() and out.dtype == torch.float32


def _add_in_one_pass(
    term: Term, window: _Window, factors: Mapping[str, torch.Tensor], base: torch.Tensor, out: torch.Tensor
) -> None:
    from wsync.adapters.trainers.lora_kernel import add_product

    assert term.a is not None
    a, b = (factors[name].to(out.device) for name in (term.a, term.b))
    left, right = b.reshape(b.shape[0], -1), a.reshape(a.shape[0], -1)
    if term.transposed:
        left, right = right.T, left.T
    here = left[window.rows], right[:, window.cols]
    add_product(base.view(window.size), *here, term.scaling, out.view(window.size))


def _add(term: Term, window: _Window, factors: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
    delta = _delta(term, window, factors, out)
    if window.inside is not None:
        delta = window.inside.view(delta.reshape(-1))
    out.add_(delta.reshape(out.shape))
    if term.magnitude is not None:
        lengths = factors[term.magnitude].to(out).reshape(-1)
        _stretch(out, window, lengths, 0 if term.transposed else 1)


def _delta(term: Term, window: _Window, factors: Mapping[str, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The window of what `term` adds, `[rows, columns]`."""
    b = factors[term.b].to(out)
    if term.a is None:
        return b.reshape(-1, 1)[window.rows] * term.scaling
    a = factors[term.a].to(out)
    if term.experts:
        a = a.reshape(term.experts, -1, a.shape[-1])[window.rows]
        b = b.reshape(b.shape[0], -1, term.experts)[..., window.rows]
        stack = torch.einsum("ore,eri->eio" if term.transposed else "ore,eri->eoi", b, a).mul_(term.scaling)
        return stack.reshape(len(stack), -1)[:, window.cols]
    a = a.reshape(a.shape[0], -1)
    b = b.reshape(b.shape[0], a.shape[0])
    if term.transposed:
        return (b[window.cols] @ a[:, window.rows]).mul_(term.scaling).T
    return (b[window.rows] @ a[:, window.cols]).mul_(term.scaling)


def _stretch(out: torch.Tensor, window: _Window, lengths: torch.Tensor, dim: int) -> None:
    """Give each row (`dim` 1) or column (`dim` 0) of the matrix in `out` its length of `lengths`."""
    matrix = out.reshape(window.size)
    here = lengths[window.rows] if dim == 1 else lengths[window.cols]
    factor = here / torch.linalg.vector_norm(matrix, dim=dim)
    out.mul_(factor.unsqueeze(dim).expand(window.size).reshape(out.shape))


@contextmanager
def _exact(device: str) -> Iterator[None]:
    """Float32 products that are float32 inside, whatever the trainer has allowed for its own."""
    # Not get_float32_matmul_precision: that raises where a trainer has set these.
    known: Any = torch.backends
    backends = (known.cuda.matmul, known.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
