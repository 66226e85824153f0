"""Storages under tensors: each once, however many tensors lie on it, whatever wraps them."""

from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wsync.errors import UnsupportedError


def inner_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The plain tensors that hold the bytes: local shards of DTensors, parts of other wrapper subclasses."""
    for tensor in tensors:
        if hasattr(tensor, "trigger_wait"):  # the result of a collective that may still run on a stream of its own
            yield from inner_tensors([tensor.trigger_wait()])
        elif is_traceable_wrapper_subclass(tensor):
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            # A DTensor names its device mesh among them.
            yield from inner_tensors(part for part in parts if isinstance(part, torch.Tensor))
        elif tensor.layout != torch.strided:
            raise UnsupportedError(
                f"a tensor {list(tensor.shape)} has layout {tensor.layout}, which cannot be offloaded; "
                f"make it dense, or clear it first if it is a gradient"
            )
        else:
            yield tensor


def storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Each storage under plain `tensors` that has memory, by what identifies it while it lives."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type != "meta" and storage.nbytes():
            found[storage._cdata] = storage
    return found


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of `storage` as uint8 `[nbytes]`, in place."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def own_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Move plain tensors that lie in memory of fixed size into storages of their own, under the same tensor objects.

    `from_pretrained` leaves parameters as views into the mapped checkpoint file. They cannot be freed one by one, and
    whoever overwrites the file changes them.
    """
    moved: dict[int, torch.UntypedStorage] = {}
    kept_alive = []  # an address is no identity once its storage is freed
    with torch.no_grad():
        for tensor in tensors:
            old = tensor.untyped_storage()
            if old.resizable():
                continue
            kept_alive.append(old)
            new = moved.get(old._cdata)
            if new is None:
                new = moved[old._cdata] = bytes_of(old).clone().untyped_storage()
            place = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = place.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())
