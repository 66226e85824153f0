"""What no sync can beat: every byte read once and written once, by one thread, tensor by tensor."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from wsync.bench.samples import Way

MEMCPY_EACH = "memcpy"
"""The C library's memcpy on one thread, a call for each tensor: weights do not lie in one piece."""

ONE_CAST = "one cast"
"""Every element read once and written once in the other dtype, by torch on one thread, tensor by tensor."""

LARGE_MEMCPY = "memcpy of halves"
"""As many bytes in two calls. Above some size, 192 MiB on some machines, memcpy writes round the cache: quicker."""

TWO_COPIES = "two copies"
"""Into a slot and out of it, one after the other on one thread: what goes through shared memory must do."""


def memcpy_ways(tensors: Sequence[torch.Tensor]) -> dict[str, Way]:
    """The two ceilings for `tensors` (contiguous), into memory that torch has allocated, as it has the weights'.

    Memory of other allocators may lie on larger pages. Takes as much memory as `tensors`, filled with their bytes.
    """
    ends = np.cumsum([0, *(tensor.nbytes for tensor in tensors)])
    target = torch.ones(int(ends[-1]), dtype=torch.uint8).numpy()
    pairs = [(target[start:end], bytes_of(tensor)) for start, end, tensor in zip(ends, ends[1:], tensors, strict=False)]
    half = len(target) // 2

    def each() -> None:
        for to, of in pairs:
            np.copyto(to, of)

    def halves() -> None:
        for _ in range(2):
            np.copyto(target[half : 2 * half], target[:half])

    return {MEMCPY_EACH: each, LARGE_MEMCPY: halves}


def cast_way(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> Way:
    """The ceiling for `tensors` (contiguous) that are wanted in `dtype`. Takes the memory of the result."""
    target = torch.ones(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    parts = torch.split(target, [tensor.numel() for tensor in tensors])
    flat = [tensor.detach().view(-1) for tensor in tensors]
    return _on_one_thread(lambda: torch._foreach_copy_(parts, flat))


def two_copies_way(tensors: Sequence[torch.Tensor], target: torch.Tensor, slot_bytes: int) -> Way:
    """Each of `tensors` (contiguous) into a slot, with the cast to the target's dtype, and from there to `target`.

    `target` is 1-D and takes them one after the other. The slot, of memory of its own, is used again once it is full.
    """
    sizes = [tensor.numel() for tensor in tensors]
    dtype = target.dtype
    parts = torch.split(target, sizes)
    flat = [tensor.detach().view(-1) for tensor in tensors]
    slot = torch.ones(max(max(sizes), min(sum(sizes), slot_bytes // dtype.itemsize)), dtype=dtype)
    fills: list[tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]] = []
    end = len(slot)
    for size, source, part in zip(sizes, flat, parts, strict=True):
        if end + size > len(slot):
            fills.append(([], [], []))
            end = 0
        for group, view in zip(fills[-1], (slot[end : end + size], source, part), strict=True):
            group.append(view)
        end += size

    def copy() -> None:
        for views, sources, results in fills:
            torch._foreach_copy_(views, sources)
            torch._foreach_copy_(results, views)

    return _on_one_thread(copy)


def bytes_of(tensor: torch.Tensor) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    """A contiguous tensor's memory, without a copy."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def _on_one_thread(way: Callable[[], object]) -> Way:
    def run() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        way()
        torch.set_num_threads(threads)

    return run
